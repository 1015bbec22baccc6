"""Two reports of the judge side by side: is this upgrade safe?"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.checks import judge
from lab.checks.record import read_cases
from lab.references import paged_attention
from lab.reports.changed_verdicts import VerdictChange, compare_verdicts
from lab.reports.recorded_file import FileKind, read_file
from tests.checks.small import SMALL
from tests.commands.command import run as run_lab

RANGES = replace(SMALL, windows=(False, True), sinks=(False, True), longest=150)
NAME = "trtllm_batch_decode_with_kv_cache"


def right(**arguments: Any) -> Any:
    return getattr(paged_attention, NAME)(**arguments)


def window_off_by_one(**arguments: Any) -> Any:
    window = arguments.get("window_left", -1)
    return right(**arguments | {"window_left": window + 1 if window >= 0 else window})


def without_sinks(**arguments: Any) -> Any:
    if arguments.get("sinks") is not None:
        raise NotImplementedError("this release has no sinks")
    return right(**arguments)


RECORDED = sorted((Path(__file__).parents[2] / "results").glob("*/**/*.json.gz"))
KERNELS = {each.__name__: SimpleNamespace(**{NAME: each}) for each in (right, window_off_by_one, without_sinks)}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("my reports")
    paths = {name: folder / f"{name}.json" for name in KERNELS}
    for name, kernel in KERNELS.items():
        judge(kernel, ranges=RANGES, only=("K13",), drawn=0, discover=False).write(paths[name])
    return paths


def outcomes(path: Path) -> list[str]:
    return [case["outcome"] for case in json.loads(path.read_text())["cases"]]


def test_newly_wrong_cases_are_counted_and_their_region_named(reports: dict[str, Path]) -> None:
    report = compare_verdicts(reports["right"], reports["window_off_by_one"])
    counts = report.record["counts"]
    assert counts["newly wrong"] == outcomes(reports["window_off_by_one"]).count("wrong") > 0
    assert counts["newly wrong"] + counts["same"] == len(outcomes(reports["right"]))
    assert "a window is set" in report.record["regions"]["newly wrong"]
    assert report.exit_status == 1


def test_newly_declined_cases_are_no_safe_upgrade(reports: dict[str, Path]) -> None:
    report = compare_verdicts(reports["right"], reports["without_sinks"])
    assert report.record["counts"]["newly declined"] == outcomes(reports["without_sinks"]).count("declined") > 0
    assert "this release has no sinks" in "\n".join(report.below)
    assert report.exit_status == 1


@pytest.mark.parametrize(
    ("before", "change"), [("window_off_by_one", VerdictChange.REPAIRED), ("without_sinks", VerdictChange.NEWLY_TAKEN)]
)
def test_what_is_better_passes(reports: dict[str, Path], before: str, change: VerdictChange) -> None:
    report = compare_verdicts(reports[before], reports["right"])
    changed = {name for name, count in report.record["counts"].items() if count}
    assert changed == {change.value, "same"}
    assert report.exit_status == 0


def test_reports_that_were_not_judged_alike_are_no_proof(reports: dict[str, Path], tmp_path: Path) -> None:
    record = json.loads(reports["right"].read_text())
    shorter = tmp_path / "shorter.json"
    shorter.write_text(json.dumps(record | {"left_out": 5, "cases": record["cases"][5:]}))
    report = compare_verdicts(reports["right"], shorter)
    assert report.exit_status == 125
    assert "different settings: left_out is 0 before, 5 after" in report.above
    assert (report.record["only_before"], report.record["only_after"]) == (5, 0)


def test_reports_that_left_cases_out_are_no_proof(reports: dict[str, Path], tmp_path: Path) -> None:
    partial = [tmp_path / "before.json", tmp_path / "after.json"]
    for path in partial:
        path.write_text(json.dumps(json.loads(reports["right"].read_text()) | {"left_out": 5}))
    report = compare_verdicts(*partial)
    assert report.exit_status == 125
    assert f"not judged as a whole: 5 cases were left out of {partial[1]}" in report.above


def test_a_report_that_lacks_most_cases_is_no_proof(reports: dict[str, Path], tmp_path: Path) -> None:
    record = json.loads(reports["right"].read_text())
    count = len(record["cases"])
    shorter = tmp_path / "shorter.json"
    for kept, status in ((count // 2, 125), (count // 2 + 1, 0)):
        shorter.write_text(json.dumps(record | {"cases": record["cases"][:kept]}))
        for pair in ((reports["right"], shorter), (shorter, reports["right"])):
            report = compare_verdicts(*pair)
            assert report.exit_status == status
            assert any("most cases are in one report alone" in line for line in report.below) == bool(status)


NOT_OURS = "other.json: not in the form that the lab writes"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"environment": [1]}, f"{NOT_OURS}: its environment is [1], and no object"),
        ({"environment": math.nan}, f"{NOT_OURS}: its environment is nan, and no object"),
        ({"checks": [1]}, NOT_OURS),
        ({"left_out": "x"}, NOT_OURS),
        ({"cases": 5}, "other.json: it is no report of this lab's judge"),
        ({"ranges": None}, "other.json: it is no report of this lab's judge"),
    ],
)
def test_the_one_of_two_files_that_is_damaged_is_named(
    reports: dict[str, Path],
    tmp_path: Path,
    changes: dict[str, Any],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other.json"
    record = json.loads(reports["right"].read_text()) | changes
    other.write_text(json.dumps({name: value for name, value in record.items() if value is not None}))
    for pair in ([str(other), str(reports["right"])], [str(reports["right"]), str(other)]):
        assert run_lab(["compare", *pair]) == 2
        assert sentence in capsys.readouterr().err
    assert run_lab(["compare", str(reports["right"]), str(tmp_path / "absent.json")]) == 2
    assert "absent.json cannot be read" in capsys.readouterr().err


def test_every_recorded_report_of_the_present_form_can_be_read() -> None:
    """Each name in the cases, once: a class, a field or a member that gets another name must get it in the records too."""
    met: set[str] = set()
    for file in map(read_file, RECORDED):
        if file.kind is not FileKind.JUDGE or "ranges" not in file.content:
            continue
        for case in file.content["cases"]:
            names = set(re.findall(r"\w+(?:\.\w+|=|\()", case["case"]))
            if names - met:
                assert list(read_cases(file.content | {"cases": [case]})), file.name
                met |= names
    assert "ReplaySequence.A_B_A" in met


def test_the_command_tells_reports_from_runs(reports: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status = run_lab(["compare", str(reports["right"]), str(reports["window_off_by_one"])])
    said = capsys.readouterr().out
    assert status == 1
    assert f"reproduce with: lab judge --case '{reports['window_off_by_one']}'#" in said
    assert run_lab(["compare", str(reports["right"]), str(reports["right"])]) == 125
