"""A damaged file ends a command in one sentence with 2 or 125; no text of a file reaches a terminal, Markdown or a page raw."""

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.checks import Level, Outcome, Ranges, Report
from lab.checks.record import ReportError, read_case, read_cases, read_expression, read_record
from lab.checks.run.verdicts import CheckedResult, Judged, WrongVector
from lab.reports.tables import Cell, Column, Table, TableReport
from lab.wording import printable
from lab.workloads.traces import read_trace
from tests.checks.test_report import report_of, verdict_of
from tests.commands.command import run
from tests.damage import HOSTILE, damaged_bytes, damaged_records

RECORDED = Path(__file__).parents[2] / "results"
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "capability": [9, 0],
    "packages": {"torch": "2.11", "flashinfer-python": "0.7.2"},
    "nvidia_smi": {"driver_version": "1"},
}
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
COUNTS = {"report": 24, "timings": 8, "experiment": 24}  # damaged records of each kind; timings have pictures


def report(**changes: Any) -> Report:
    outcomes = (Outcome.RIGHT, Outcome.WRONG, Outcome.DECLINED, Outcome.KNOWN)
    verdicts = [verdict_of(outcome, number=number) for number, outcome in enumerate(outcomes, start=1)]
    return report_of(*verdicts, environment=ENVIRONMENT, **changes)


def timings() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDED / "nvidia-h100/timings.json").read_text())
    record["benchmarks"] = record["benchmarks"][:3]
    for row in record["benchmarks"]:
        row["stats"]["data"] = row["stats"]["data"][:4]
    return record


def experiment() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDED / "nvidia-h200/clocks.json").read_text())
    return record


@pytest.fixture
def commands(tmp_path: Path) -> Callable[[Path], Iterator[list[str]]]:
    report().write(good := tmp_path / "good.json")
    newer = {**ENVIRONMENT, "packages": {"flashinfer-python": "0.7.3"}}
    replace(report(), environment=newer).write(tmp_path / "newer.json")
    (tmp_path / "timings.json").write_text(json.dumps(timings()))

    def lines(path: Path) -> Iterator[list[str]]:
        yield ["compare", str(path), str(good)]
        yield ["compare", str(good), str(path), "--json", "-"]
        yield ["compare", str(tmp_path / "timings.json"), str(path), "--markdown", "-"]
        yield ["compare", str(path), "--by", "implementation", "one", "other"]
        yield ["releases", str(path), str(tmp_path / "newer.json")]
        yield ["judge", "--coverage", str(path)]
        yield ["judge", "--case", f"{path}#999"]
        yield ["judge", "json", "--in-process", "--out", str(path)]
        yield ["report", str(path), "--out", str(tmp_path / "tables")]
        yield ["merge", str(path), "--out", str(tmp_path / "all.json")]

    return lines


def check(line: list[str], capsys: pytest.CaptureFixture[str], is_damaged: bool = False) -> None:
    status = run(line)
    out, err = capsys.readouterr()
    assert status in ((2, 125) if is_damaged else (0, 1, 2, 125)), line
    assert not UNPRINTABLE.search(out + err), line
    if status == 2:
        assert err.startswith("lab: "), line
        assert "Traceback" not in err
        assert (len(err.splitlines()), len(err) < 1000) == (1, True), line


@pytest.mark.parametrize("seed", range(2))
def test_any_bytes_are_a_sentence(
    seed: int, commands: Callable[[Path], Iterator[list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / f"bad.json{'.gz' * seed}"
    for content in damaged_bytes((tmp_path / "good.json").read_bytes(), random.Random(seed)):
        bad.write_bytes(content)
        for line in commands(bad):
            check(line, capsys)


@pytest.mark.parametrize("kind", COUNTS)
def test_any_damaged_value_is_a_sentence(
    kind: str, commands: Callable[[Path], Iterator[list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {"report": report(shard="1/1").as_record(), "timings": timings(), "experiment": experiment()}
    bad = tmp_path / "bad.json"
    for content in damaged_records(records[kind], random.Random(kind), COUNTS[kind]):
        bad.write_bytes(content)
        for line in commands(bad):
            check(line, capsys)


@pytest.mark.parametrize("kind", COUNTS)
def test_a_page_of_damaged_values_is_made_or_names_the_file(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("itables")
    records = {"report": report().as_record(), "timings": timings(), "experiment": experiment()}
    folder, page = tmp_path / "results", tmp_path / "page.html"
    folder.mkdir()
    report().write(folder / "good.json")
    for content in damaged_records(records[kind], random.Random(kind), COUNTS[kind] // 2):
        (folder / "bad.json").write_bytes(content)
        status = run(["html", str(folder), "--out", str(page)])
        err = capsys.readouterr().err
        assert (status, "bad.json: not in the form" in err) in ((0, False), (2, True)), err
        assert "<script>alert" not in (page.read_text() if page.exists() else "")


@pytest.mark.parametrize("kind", ["pipe", "loop", "folder", "device", "name", "dangling"])
def test_what_is_no_file_is_a_sentence(
    kind: str, commands: Callable[[Path], Iterator[list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = {"device": Path(os.devnull), "name": tmp_path / ("x" * 300)}.get(kind, tmp_path / "bad.json")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "folder":
        path.mkdir()
    for line in commands(path):
        if "--out" not in line or line[0] == "report":
            check(line, capsys, is_damaged=True)
    check(["compare", str(path), str(path)], capsys, is_damaged=True)
    for folder in (str(path), f"{path}#{'9' * 5000}"):
        check(["judge", "--calls", folder], capsys, is_damaged=True)
        check(["recorded", "shrink", folder], capsys, is_damaged=True)


EXPRESSIONS = (
    "(" * 50_000 + ")" * 50_000,
    "-" * 50_000 + "1",
    "1+" * 50_000 + "1",
    "x" * 50_000,
    "AttentionCase(" * 2_000,
    "[" * 3_000 + "]" * 3_000,
    "Ranges(seed=" + "9" * 50_000 + ")",
    "AttentionCase(AttentionCall.DECODE, None, {})",
    "Ranges(**{'seed': 1})",
    "Ranges(dtypes=1)",
    "Ranges(",
    "Ranges(nothing=1)",
    "Ranges(longest=-1)",
    "AttentionCase.__init__",
    "print(1)",
    "().__class__.__bases__",
    "__import__('os').system('true')",
    "Ranges\0()",
    HOSTILE,
    "",
)


@pytest.mark.parametrize("text", EXPRESSIONS, ids=range(len(EXPRESSIONS)))
def test_an_expression_that_is_no_case_is_a_short_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"no case|no part of a case|must be|one each") as error:
        read_expression(text)
    assert len(str(error.value)) < 1000


def test_a_case_of_a_damaged_report_is_read_or_refused(tmp_path: Path) -> None:
    path, dice = tmp_path / "bad.json", random.Random(0)
    for content in damaged_records(report().as_record(), dice, 500):
        path.write_bytes(content)
        with suppress(ReportError):
            read_case(path, dice.randrange(1, 5))
        with suppress(ReportError):
            list(read_cases(read_record(path)))


@pytest.mark.parametrize("changes", [{"case": "Ranges()"}, {"worst_ratio": []}])
def test_a_damaged_case_is_named_with_its_file(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = report().as_record()
    record["cases"][1] |= changes
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(record))
    assert run(["judge", "--case", f"{path}#2", "--in-process"]) == 2
    assert f"{path}: case 2" in capsys.readouterr().err.replace("\n", "")
    if "worst_ratio" in changes:
        assert run(["judge", "--coverage", str(path)]) == 2
        assert f"{path}: case 2: " in capsys.readouterr().err
    for digits in ("9" * 5000, "²"):
        assert run(["judge", "--case", f"{path}#{digits}"]) == 2


def test_a_damaged_trace_is_a_sentence(tmp_path: Path) -> None:
    rows = '{"timestamp": 7, "input_length": 5, "output_length": 6}\n' * 3
    path, dice = tmp_path / "trace.jsonl", random.Random(0)
    contents = [*damaged_bytes(rows.encode(), dice), *damaged_records(json.loads(rows.splitlines()[0]), dice, 24)]
    for content in contents:
        path.write_bytes(content)
        with suppress(ValueError):
            assert read_trace(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="no file"):
        read_trace(path)


def test_a_full_disk_is_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report().write(tmp_path / "one.json")
    replace(report(), level=Level.FULL, ranges=Ranges(seed=1)).write(tmp_path / "other.json")
    for option in ("--json", "--markdown"):
        assert run(["compare", str(tmp_path / "one.json"), str(tmp_path / "other.json"), option, "/dev/full"]) == 2
        assert capfd.readouterr().err == "lab: /dev/full: No space left on device\n"
    narrow = "--only K12 --drawn 0 --groups 2 --num-kv-heads 1 --head-dims 64 --page-sizes 16 --q-lens 1 --longest 40"
    line = f"judge tests.checks.someone_elses --device cpu --in-process {narrow} --out /dev/full"
    assert run(line) == 2
    assert capfd.readouterr().err.splitlines()[-1] == "lab: /dev/full: No space left on device"


def test_hostile_texts_are_printed_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each text of a table and of a report of the judge, on the terminal and in Markdown."""
    table = Table((Column(HOSTILE, False),), ((Cell(HOSTILE),),))
    made = TableReport((HOSTILE,), table, (HOSTILE, HOSTILE), {"name": HOSTILE})
    made.show(markdown_to=str(tmp_path / "page.md"), json_to=str(tmp_path / "page.json"))
    shown, page = capsys.readouterr().out, (tmp_path / "page.md").read_text()
    assert not UNPRINTABLE.search(shown + page)
    assert "<script>" not in page
    assert "<" not in page.replace("&lt;", "")
    assert json.loads((tmp_path / "page.json").read_text())["name"].startswith(HOSTILE.partition("\ud800")[0])


def test_a_kernels_hostile_message_and_name_are_printed_as_escapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CheckedResult(HOSTILE, "output", {}, True, (), WrongVector(HOSTILE, (1.0,), (float("nan"),)))
    wrong = verdict_of(Outcome.WRONG, judged=Judged(Outcome.WRONG, (HOSTILE,), (HOSTILE,), 9.0, 1, (result,)))
    declined = verdict_of(Outcome.DECLINED, judged=Judged(Outcome.DECLINED, (), (HOSTILE,)))
    hostile = report_of(wrong, declined, implementation=HOSTILE, environment={"gpu": HOSTILE}, ended=HOSTILE)
    monkeypatch.setattr("lab.checks.run.judge.judge", lambda *_, **__: hostile)
    assert run(["judge", "lab.references"]) == 1
    shown = capsys.readouterr().out
    assert printable(HOSTILE.partition("\n")[0]) in shown
    assert not UNPRINTABLE.search(shown)
    assert run(["judge", f"{HOSTILE}.py", "--in-process"]) == 2
    assert run(["judge", "--case", f"{HOSTILE}#1"]) == 2
    assert not UNPRINTABLE.search("".join(capsys.readouterr()))
