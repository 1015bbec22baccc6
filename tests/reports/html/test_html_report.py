"""The page to share: all that is recorded is in it as recorded, and it asks nobody for anything."""

import json
import math
import re
import shlex
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import markupsafe
import pytest

pytest.importorskip("bs4", reason="beautifulsoup4, of the extra dev, reads the page")
# What the extra html brings.
pytest.importorskip("itables")
pytest.importorskip("jinja2")
pytest.importorskip("markdown_it")
pytest.importorskip("matplotlib")

from lab.files import read_json, without_suffix, write_text
from lab.reports.html.judged import check_name, decline_table, markdown_html
from lab.reports.html.page import html_report
from lab.reports.recorded_file import FileKind, RecordedFile, RecordedFileError, read_folder
from lab.reports.tables import flattened
from lab.wording import slug
from lab.workloads.interfaces import interface_of
from studies import STUDIES
from studies.shown import drawings_of, question_and_drawings
from tests.commands.command import run as run_lab
from tests.reports.html.parsed import Page

RECORDED = Path(__file__).parents[3] / "results" / "nvidia-h200"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def files() -> tuple[RecordedFile, ...]:
    return read_folder(RECORDED)


def experiments(files: Sequence[RecordedFile]) -> list[RecordedFile]:
    found = [file for file in files if file.kind is FileKind.EXPERIMENT]
    assert found
    return found


@pytest.fixture(scope="module")
def html(files: tuple[RecordedFile, ...]) -> str:
    return html_report(RECORDED, files)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def contents() -> Iterator[tuple[str, Any]]:
    for path in sorted((*RECORDED.rglob("*.json"), *RECORDED.rglob("*.json.gz"))):
        yield without_suffix(path).relative_to(RECORDED).as_posix(), read_json(path)


def test_it_asks_nobody_for_anything(page: Page) -> None:
    assert page.requests() == []
    assert page.images
    assert all(image.startswith("data:image/") for image in page.images)
    assert not {"iframe", "object", "embed", "video", "audio"} & page.tags
    assert page.policy.startswith("default-src 'none'")
    assert "http" not in page.policy


@pytest.mark.parametrize(
    "asking",
    [
        '<img src="https://example.org/a.png">',
        '<link rel="stylesheet" href="a.css">',
        '<style>p { background: url("//example.org/a.png") }</style>',
        '<style>@import "a.css";</style>',
        '<p style="background: url(a.png)">',
        '<script type="module">import a from "https://example.org/a.js";</script>',
    ],
)
def test_what_asks_is_seen(asking: str) -> None:
    assert len(Page(asking).requests()) == 1


def test_links_lead_to_places_in_the_page(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    leading = {value[1:] for tag, name, value in page.links if (tag, name) == ("a", "href")}
    assert leading
    assert leading <= set(page.ids)


def test_every_file_has_its_environment(page: Page) -> None:
    table = page.tables["environments"]
    assert sorted(cell.text for cell in table.column("file")) == sorted(name for name, _ in contents())


def test_every_check_of_every_run_is_there_with_its_numbers(page: Page) -> None:
    reports = [(name, content) for name, content in contents() if "checks" in content]
    table = page.tables["verdicts"]
    checks = [(name, check) for name, content in reports for check in content["checks"]]
    assert len(table.rows) == len(checks) > 0
    by_check = {tuple(row[name].text for name in ("run", "check", "function")): row for row in table.records()}
    for name, check in checks:
        cell = by_check[name, check_name(check["check"]), interface_of(check["interface"]).name.lower()]
        assert cell["verdict"].text == check["outcome"]
        assert cell["results"].order == check["judged"]
        assert cell["cases"].order == sum(check["counts"].values())
        assert cell["largest error with this verdict, % of bound"].order == pytest.approx(
            100 * float(check["worst_ratio"])
        )
        for outcome in {"right", "known", "wrong", "failed", "declined"} & set(table.headings):
            assert cell[outcome].order == check["counts"].get(outcome, 0)


def test_every_verdict_is_in_the_matrix(page: Page) -> None:
    matrix = page.tables["verdict-matrix"].records()
    by_function = {(row["run"].text, row["function"].text): row for row in matrix}
    for name, content in contents():
        for check in content.get("checks", ()) if isinstance(content, dict) else ():
            row = by_function[name, interface_of(check["interface"]).name.lower()]
            assert row[check["check"]].text.split()[0] == check["outcome"]


def test_what_is_broken_stands_first(page: Page) -> None:
    order = ["wrong", "failed", "known", "declined", "right"]
    for table in ("judge-runs", "verdicts", "faults"):
        # A verdict may end in ", but not all judged".
        places = [order.index(cell.text.split(",")[0]) for cell in page.tables[table].column("verdict")]
        assert places == sorted(places)
    assert list(page.tables)[:2] == ["judge-runs", "run-0-fastest"]


def test_the_page_opens_with_the_answer(html: str) -> None:
    said = html.split("<section", 2)[1]
    assert "15 runs of the judge: 2 wrong, 2 failed, 8 known, 3 right." in said
    assert "Fastest in 75 scenarios with several implementations, in 4 runs: " in said
    assert "Failed in 5 of 12 cases." in said
    assert said.index("<b>known</b>: a result is wrong in a way that") < said.index('<span class="known">')
    titles = re.findall(r"<summary>(.*?) <span", html)
    assert "timings.json: GPU time" in titles
    assert len(titles) == len(set(titles))
    assert "K1 oracle of decode: wrong. What the check catches: any error of an output vector" in said


@pytest.mark.parametrize("name", ["mine.json", "mine.json.gz", "my run.json"])
def test_a_diagnosis_stands_at_the_top(name: str, tmp_path: Path) -> None:
    named = str(markupsafe.escape(shlex.quote(name)))
    record = judged("a wrong row", 3.0)
    record["cases"][0] |= {"number": 1, "case": "Case(window_left=16)"}
    record["diagnosis"] = {
        "sentence": "The window has one key too few.",
        "reach": "compared: 74 results of 9 cases",
        "regions": [
            {"rule": "window_left >= 0", "wrong": 13, "results": 13, "right_outside": 61, "outside": 62},
            {
                "rule": "q_len >= 2",
                "sentence": "The LSE is wrong in most cases where q_len is 2",
                "wrong": 3,
                "results": 5,
                "case": 1,
            },
            {"sentence": "The LSE is wrong in 2 of 3 results where sinks are given", "wrong": 2, "results": 3},
        ],
        "smallest": {
            "case": 1,
            "result": "plain",
            "expected": ["0.5"],
            "got": ["0.2512345", "inf"],
            "where": "row 3, head 0",
        },
        "follows": ["K3"],
    }
    write_text(tmp_path / name, json.dumps(record))
    written = html_report(tmp_path, read_folder(tmp_path))
    said = [
        "1 run of the judge: 1 wrong.",
        "The window has one key too few.",
        "compared: 74 results of 9 cases",
        "window_left &gt;= 0: wrong in 13 of 13, right in 61 of 62 other results",
        f"The LSE is wrong in most cases where q_len is 2: wrong in 3 of 5; lab judge --case {named}#1",
        "<li>The LSE is wrong in 2 of 3 results where sinks are given</li>",
        "smallest case, #1</dt><dd><code>Case(window_left=16)",
        f"<code>lab judge --case {named}#1",
        "row 3, head 0",
        "0.2512 inf",
        'id="judge-runs"',
    ]
    places = [written.index(each) for each in said]
    assert places == sorted(places)


def test_every_cited_finding_is_there_with_its_text(page: Page, html: str) -> None:
    cited = {
        each.split("#")[1]
        for _, content in contents()
        if "checks" in content
        for case in content["cases"]
        for each in case.get("finding", "").split("; ")
        if each
    }
    assert {f"finding-{heading}" for heading in cited} == {each for each in page.ids if each.startswith("finding-")}
    for line in (RECORDED / "findings.md").read_text().splitlines():
        if line.startswith("## ") and slug(line[3:]) in cited:
            assert re.search(rf'id="finding-{slug(line[3:])}">\s*<h4>{line.split()[1]} ', html)


@pytest.mark.parametrize("table", ["judge-runs", "verdicts"])
def test_the_largest_error_of_a_right_case_is_of_right_cases(page: Page, table: str) -> None:
    for name, content in contents():
        if "checks" in content:
            ratios = [float(case.get("worst_ratio", 0)) for case in content["cases"] if case["outcome"] == "right"]
            rows = [row for row in page.tables[table].records() if row["run"].text == name]
            shown = [row["largest error of a right case, % of bound"].order for row in rows]
            assert max(filter(None, shown)) == pytest.approx(100 * max(ratios))


def test_every_benchmark_is_there_with_its_numbers(page: Page) -> None:
    runs = [content for _, content in contents() if "benchmarks" in content]
    for place, run in enumerate(runs):
        table = page.tables[f"run-{place}-gpu"]
        timed = [each for each in run["benchmarks"] if each["extra_info"].get("clock") in ("graph", "cupti", "events")]
        assert len(table.rows) == len(timed)
        assert "timed by" in table.headings or "timed by" in table.common
        assert {"scenario", "floor, µs", "time over floor"} <= set(table.headings)
        assert "implementation" in table.headings or "implementation" in table.common
        shown = sorted(
            (row["scenario"].text, row["median, µs"].order, row["floor, µs"].order) for row in table.records()
        )
        recorded = sorted(
            (
                each["extra_info"]["scenario"],
                statistics.median(1e6 * seconds for seconds in each["stats"]["data"]),
                each["extra_info"]["floor_us"],
            )
            for each in timed
        )
        assert shown == recorded


def test_every_row_of_every_experiment_is_there_with_its_numbers(page: Page, files: tuple[RecordedFile, ...]) -> None:
    for record in experiments(files):
        for key, rows in record.content.items():
            if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
                continue
            name = f"{record.name.replace('/', '-')}-{key}"
            for row, shown in zip(rows, page.tables[name].records(), strict=True):
                for heading, value in flattened(row).items():
                    if isinstance(value, int | float) and not isinstance(value, bool):
                        assert (
                            (shown[heading].order == value)
                            if heading in shown
                            else f"{heading} " in page.tables[name].common
                        )
                    elif isinstance(value, str) and heading in shown:
                        assert shown[heading].text in (value, "–")


def test_the_same_files_give_the_same_page(files: tuple[RecordedFile, ...]) -> None:
    by_size = sorted(files, key=lambda file: file.path.stat().st_size, reverse=True)
    few = list({file.kind: file for file in by_size}.values())  # the smallest of each kind
    assert html_report(RECORDED, few) == html_report(RECORDED, few)


def judged(wrongs: str, ratio: float | str) -> dict[str, Any]:
    case = {"check": "K1", "interface": "of_tomorrow", "outcome": "wrong", "wrongs": [wrongs], "worst_ratio": ratio}
    check = {"check": "K1", "interface": "of_tomorrow", "outcome": "wrong", "counts": {"wrong": 1}, "judged": 1}
    return {"implementation": "<b>mine</b>", "checks": [check | {"worst_ratio": ratio}], "cases": [case]}


@pytest.mark.parametrize(("is_right", "verdict"), [(True, "right"), (False, "right, but not all judged")])
def test_a_run_that_left_cases_out_is_not_right_as_a_whole(is_right: bool, verdict: str, tmp_path: Path) -> None:
    record = judged("", 0.5) | {"is_right": is_right}
    (case,), (check,) = record["cases"], record["checks"]
    case["outcome"], check["outcome"], check["counts"] = "right", "right", {"right": 1}
    (tmp_path / "mine.json").write_text(json.dumps(record))
    read = Page(html_report(tmp_path, read_folder(tmp_path)))
    assert [cell.text for cell in read.tables["judge-runs"].column("verdict")] == [verdict]


def test_what_is_recorded_is_text_and_never_a_tag(tmp_path: Path) -> None:
    evil = "</td><script>alert(1)</script><img src=x>"
    (tmp_path / "mine.json").write_text(json.dumps(judged(evil, "inf")))
    (tmp_path / "other.json").write_text(json.dumps({evil: [{evil: evil, "n": 1}, {evil: "b", "n": 2}]}))
    (tmp_path / "notes.md").write_text(
        f"# {evil}\n\n[a link](https://example.org) ![a picture](https://example.org/a.png)\n"
    )
    written = html_report(tmp_path, read_folder(tmp_path))
    read = Page(written)
    assert read.requests() == []
    assert "alert(1)" not in "".join(read.scripts)
    assert read.tables["faults"].column("wrong in the worst case")[0].text == evil
    assert read.tables["verdicts"].column("largest error with this verdict, % of bound")[0].order == math.inf
    assert read.tables["verdicts"].column("largest error with this verdict, % of bound")[0].text == "not finite"


def test_comments_and_pictures_of_a_note_are_not_shown() -> None:
    assert markdown_html("<!-- run,\nonce -->\nText ![a picture](a.png)\n") == "<p>Text </p>\n"


def test_a_folder_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1, 2, 3]")
    (tmp_path / "facts.json").write_text(json.dumps({"answer": 42, "rows": [], "deep": {"er": "x"}}))
    (tmp_path / "survey.json").write_text(json.dumps({"summary": {}, "verdicts": []}))
    assert [(file.name, file.kind) for file in read_folder(tmp_path)] == [
        ("facts", FileKind.EXPERIMENT),
        ("list", FileKind.OTHER),
        ("survey", FileKind.OTHER),
    ]
    written = html_report(tmp_path, read_folder(tmp_path))
    assert "list.json holds a list of 3 items" in written
    assert "survey.json holds summary, verdicts" in written
    assert "deep.er" in written
    assert "No GPU recorded" in written


def test_a_picture_that_cannot_be_drawn_says_why(tmp_path: Path) -> None:
    (tmp_path / "draft_steps.json").write_text(json.dumps({"rows": []}))
    written = html_report(tmp_path, read_folder(tmp_path))
    assert written.count("Not drawn: ") == 2
    assert "saves per draft: the file has no &#39;pr_26241&#39;" in written


def test_every_experiment_that_can_be_is_drawn(html: str, files: tuple[RecordedFile, ...]) -> None:
    assert "Not drawn: " not in html
    drawn = {file.experiment: len(drawings_of(file.experiment)) for file in experiments(files)}
    pictures = [each for each in re.findall(r'<img [^>]*alt="([^"]*)"', html) if "graph l2" not in each]
    assert len(pictures) == sum(drawn.values())
    assert {name for name in STUDIES if drawings_of(name)} == {name for name, number in drawn.items() if number}


def test_a_module_of_another_name_is_no_picture_of_an_experiment() -> None:
    assert question_and_drawings("timings") == ("", ())
    assert question_and_drawings("forward_modes") == ("", ())  # there is such a module, of a notebook


def test_what_is_not_recorded_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecordedFileError, match="no folder with JSON files"):
        read_folder(tmp_path)
    (tmp_path / "half.json").write_text("{")
    assert run_lab(f"html {tmp_path} --out {tmp_path}/a.html") == 2
    assert "half.json: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "a.html").exists()


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "facts.json").write_text('{"answer": 42}')
    assert run_lab(f"html {tmp_path} --out {tmp_path}/made/a.html") == 0
    assert "MB" in capsys.readouterr().out
    assert "42" in (tmp_path / "made" / "a.html").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    driver = pytest.importorskip("playwright.sync_api", reason="playwright, of the extra dev, drives the browser")
    with driver.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser: Any, path: Path, html: str, **settings: Any) -> tuple[Any, list[str], list[str]]:
    """The page in a new tab; the addresses that it asks for besides itself and what its console says, which go on growing."""
    path.write_text(html, encoding="utf-8")

    def is_foreign(url: str) -> bool:
        return url != path.as_uri() and not url.startswith("data:")

    tab = browser.new_page(viewport={"width": 1280, "height": 900}, **settings)
    asked: list[str] = []
    said: list[str] = []
    tab.on("request", lambda request: asked.append(request.url) if is_foreign(request.url) else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("console", lambda message: said.append(message.text))
    tab.goto(path.as_uri())
    tab.wait_for_function("document.body.dataset.tables === 'made'")
    return tab, asked, said


def test_in_a_browser_nothing_is_requested(browser: Any, html: str, tmp_path: Path) -> None:
    tab, asked, said = opened(browser, tmp_path / "a.html", html)
    assert (asked, said) == ([], [])
    for details in tab.query_selector_all("details:not([open]) > summary"):
        details.click()
    tab.wait_for_timeout(500)
    assert (asked, said) == ([], [])
    for width in (1280, 390):
        tab.set_viewport_size({"width": width, "height": 900})
        assert tab.evaluate("document.documentElement.scrollWidth") == width  # wide tables scroll by themselves
    tab.close()


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_in_a_browser_everything_follows_dark_mode(
    scheme: str, is_dark: bool, browser: Any, html: str, tmp_path: Path
) -> None:
    tab, _, _ = opened(browser, tmp_path / "a.html", html, color_scheme=scheme)
    brightness = "place => getComputedStyle(document.querySelector(place)).backgroundColor.match(/\\d+/g).slice(0, 3)"
    for place in ("body", ".dt-container", "table.data td"):
        assert all((int(part) < 64) == is_dark for part in tab.evaluate(brightness, place)), place
    assert ("invert" in tab.evaluate("getComputedStyle(document.querySelector('figure img')).filter")) == is_dark
    tab.close()


def test_in_a_browser_a_request_would_be_seen_and_is_blocked(browser: Any, html: str, tmp_path: Path) -> None:
    asking = html.replace("</h1>", '</h1><img src="http://127.0.0.1:9/a.png">', 1)
    tab, _, said = opened(browser, tmp_path / "a.html", asking)
    assert any("Content Security Policy" in each for each in said)
    tab.close()
    tab, asked, _ = opened(browser, tmp_path / "b.html", asking.replace("Content-Security-Policy", "x", 1))
    assert asked == ["http://127.0.0.1:9/a.png"]
    tab.close()


def test_in_a_browser_a_click_sorts_and_a_word_filters(browser: Any, html: str, tmp_path: Path) -> None:
    tab, _, _ = opened(browser, tmp_path / "a.html", html)
    heading = tab.locator("#run-0-gpu thead th", has_text="median, µs")
    place = heading.evaluate("th => th.cellIndex")
    read = "(table, place) => [...table.tBodies[0].rows].map(row => Number(row.cells[place].dataset.order))"
    table = tab.locator("#run-0-gpu")
    before = table.evaluate(read, place)
    heading.locator(".dt-column-title").click()
    rising = table.evaluate(read, place)
    heading.locator(".dt-column-title").click()
    falling = table.evaluate(read, place)
    assert rising == sorted(rising) != before
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > rising[-1]
    tab.locator("#run-0-gpu_wrapper input[type=search]").first.fill("target_verify")
    names = table.locator("tbody tr td:first-child").all_inner_texts()
    assert names
    assert all("target_verify" in name for name in names)
    tab.close()


def test_only_declined_cases_were_not_judged() -> None:
    right = {"outcome": "right", "declines": ["return_lse: it has none"]}
    declined = {"outcome": "declined", "declines": ["a window"], "by_lab": True}
    run: Any = SimpleNamespace(name="mine", cases=[right, declined, declined])
    (row,) = decline_table([run]).rows
    assert [cell.text for cell in row] == ["mine", "2", "the lab", "a window"]
