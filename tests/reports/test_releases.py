"""Reports of the judge lined up by release: which finding lives where."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.checks import judge
from lab.checks.run.known_failures import FailingKernel, KnownFailure
from lab.reports.recorded_file import NotComparableError, RecordedFileError
from lab.reports.releases import releases_report
from tests.commands.command import run as run_lab
from tests.reports.test_changed_verdicts import NAME, RANGES, right, window_off_by_one, without_sinks

PAGE = """# Findings

## 1. A cited `one`, of windows

## 2. One that no report cites
"""
ANCHOR = "findings.md#1-a-cited-one-of-windows"

Recorded = Callable[..., Path]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return a function that records the judge's report of a kernel as that of a release."""
    folder = tmp_path_factory.mktemp("releases")

    def record(version: str, kernel: Callable[..., Any], seed: int = 0, cites: str = "") -> Path:
        implementation = SimpleNamespace(**{NAME: kernel})
        path = folder / f"{version}-{kernel.__name__}-{seed}-{len(cites)}.json"
        if not path.exists():
            judge(implementation, ranges=RANGES, only=("K13",), drawn=0, discover=False, seed=seed).write(path)
            report = json.loads(path.read_text())
            report["environment"]["packages"] |= {"flashinfer-python": version}
            for case in report["cases"]:
                if cites and case["outcome"] == "wrong":
                    case |= {"outcome": "known", "finding": cites}
            path.write_text(json.dumps(report))
        return path

    return record


def statuses(report: Any, row: int = 0) -> dict[str, str]:
    found = report.record["findings"][row]
    return {version: each["status"] for version, each in found.items() if version != "finding"}


def test_a_region_that_was_repaired(recorded: Recorded) -> None:
    report = releases_report([recorded("0.1", window_off_by_one), recorded("0.2", right)])
    assert statuses(report) == {"0.1": "present", "0.2": "absent"}
    (row,) = report.record["findings"]
    assert "a window" in row["finding"]
    assert row["0.1"]["wrong"] == row["0.2"]["right"] > 0
    assert any(line.startswith("0.1 to 0.2, repaired: The output is wrong wherever") for line in report.below)
    assert report.below[-1] == "Findings and regions present, of 1: 1 in 0.1, 0 in 0.2."
    assert report.exit_status == 0


def test_what_is_wrong_in_other_releases_has_a_row_of_its_own(recorded: Recorded) -> None:
    def wrong(**arguments: Any) -> Any:
        out = right(**arguments)
        return out * 2 if arguments.get("sinks") is None else out

    paths = [recorded("0.1", wrong), recorded("0.2", window_off_by_one), recorded("0.3", right)]
    report = releases_report(paths)
    found = {tuple(statuses(report, row).values()) for row in range(len(report.record["findings"]))}
    assert {("present", "absent", "absent"), ("present", "present", "absent")} <= found


def test_each_heading_of_the_page_has_a_row(recorded: Recorded, tmp_path: Path) -> None:
    page = tmp_path / "findings.md"
    page.write_text(PAGE)
    known = recorded("0.1", window_off_by_one, cites=ANCHOR)
    report = releases_report([known, recorded("0.2", right)], findings=page)
    assert [row["finding"] for row in report.record["findings"]] == [
        "1. A cited `one`, of windows",
        "2. One that no report cites",
    ]
    assert statuses(report) == {"0.1": "present", "0.2": "absent"}
    assert statuses(report, 1) == dict.fromkeys(("0.1", "0.2"), "not reachable")


def test_what_is_wrong_in_another_way_does_not_tell_a_finding(recorded: Recorded) -> None:
    known = recorded("0.1", window_off_by_one, cites=ANCHOR)
    report = releases_report([known, recorded("0.2", window_off_by_one)])
    assert statuses(report) == {"0.1": "present", "0.2": "not reachable"}
    assert statuses(report, 1) == {"0.1": "not reachable", "0.2": "present"}


def test_the_known_failures_as_they_are_now_tell_what_a_recorded_case_shows(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [recorded("0.1", window_off_by_one), recorded("0.2", right)]
    name, capability = (json.loads(paths[0].read_text()).get(key) for key in ("implementation", "capability"))
    kernel = FailingKernel((name,), capability, "flashinfer-python", ("0.1",))
    entry = KnownFailure(kernel, ("K13",), "vectors are wrong")
    monkeypatch.setattr("lab.reports.releases.KNOWN_FAILURES", {ANCHOR: (entry,)})
    (row,) = releases_report(paths).record["findings"]
    assert row["finding"] == ANCHOR
    assert row["0.1"]["status"] == "present"
    assert row["0.2"]["status"] == "absent"


def test_two_recorded_releases_of_flashinfer() -> None:
    """Both hold for e4m3 K/V; what neither cites is the judge's fault in these reports, as the page says."""
    results = Path(__file__).parents[2] / "results"
    paths = [results / "nvidia-h200-releases" / f"{version}-e4m3.json.gz" for version in ("0.6.12", "0.6.18")]
    report = releases_report(paths, findings=results / "nvidia-h200/findings.md")
    found = {row["finding"].partition(".")[0]: row for row in report.record["findings"]}
    for number in ("12", "13"):
        assert [found[number][version]["status"] for version in ("0.6.12", "0.6.18")] == ["present", "absent"]
    for number in ("3", "8", "9"):
        assert [found[number][version]["status"] for version in ("0.6.12", "0.6.18")] == ["present", "present"]
    assert sum(row["0.6.18"]["wrong"] for key, row in found.items() if not key.isdigit()) == 2


def test_what_a_release_declines_is_not_reachable_in_it(recorded: Recorded) -> None:
    def declines_windows(**arguments: Any) -> Any:
        if arguments.get("window_left", -1) >= 0:
            raise NotImplementedError("this release has no windows")
        return right(**arguments)

    report = releases_report([recorded("0.1", declines_windows), recorded("0.2", window_off_by_one)])
    assert statuses(report) == {"0.1": "not reachable", "0.2": "present"}


def test_reports_of_other_axes_are_parts_of_one_release(recorded: Recorded) -> None:
    parts = [
        recorded(version, kernel, seed)
        for version, kernel in (("0.1", window_off_by_one), ("0.2", right))
        for seed in (0, 7)
    ]
    report = releases_report(parts)
    assert [len(each["files"]) for each in report.record["releases"]] == [2, 2]
    assert report.exit_status == 0
    assert len(report.record["changes"]) == 4


def test_reports_that_were_not_judged_alike_are_no_proof(recorded: Recorded) -> None:
    report = releases_report([recorded("0.1", window_off_by_one), recorded("0.2", right, 7)])
    assert report.exit_status == 125
    assert any("different settings: 0.1 and 0.2 do not have reports of the same axes" in line for line in report.above)


def test_one_release_alone_says_nothing(recorded: Recorded, tmp_path: Path) -> None:
    with pytest.raises(NotComparableError, match=r"all reports are of flashinfer-python 0\.1"):
        releases_report([recorded("0.1", right), recorded("0.1", right, 7)])
    with pytest.raises(NotComparableError, match="on the same axes"):
        releases_report([recorded("0.1", right), recorded("0.1", without_sinks)])
    with pytest.raises(NotComparableError, match="has no version of the package no-such-package"):
        releases_report([recorded("0.1", right)], package="no-such-package")
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(RecordedFileError, match="no report of the judge"):
        releases_report([other])


def test_the_command_writes_markdown(recorded: Recorded, tmp_path: Path) -> None:
    page = tmp_path / "releases.md"
    paths = [str(recorded("0.1", window_off_by_one)), str(recorded("0.2", right))]
    assert run_lab(["releases", *paths, "--markdown", str(page)]) == 0
    assert "| present, " in page.read_text()
    assert run_lab(["releases", paths[0]]) == 125
