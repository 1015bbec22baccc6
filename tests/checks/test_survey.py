"""The survey judges every mode, writes a report, and its exit status tells."""

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lab.checks import survey
from lab.metadata import ForwardMode

SMALL = ["--geometries", "tiny", "--page-sizes", "16", "--q-lens", "2"]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process would not see the modules that these tests make up."""

    class InProcess:
        def __init__(self, jobs: int, mp_context: object) -> None:
            pass

        def __enter__(self) -> "InProcess":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
            future: Future[Any] = Future()
            future.set_result(function(*arguments))
            return future

    monkeypatch.setattr(survey, "ProcessPoolExecutor", InProcess)


@pytest.fixture
def short_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cases without the two long prefixes, which cost a CPU most of the time."""
    mode_cases = survey.mode_cases
    monkeypatch.setattr(survey, "mode_cases", lambda name, page, q_lens: mode_cases(name, page, q_lens, long=(40, 50)))


def module(name: str, monkeypatch: pytest.MonkeyPatch, function: object) -> str:
    made = ModuleType(name)
    made.trtllm_batch_decode_with_kv_cache = function  # type: ignore[attr-defined]
    made.trtllm_batch_context_with_kv_cache = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, made)
    return name


def test_every_mode_geometry_page_size_and_width_is_there() -> None:
    names = sorted(survey.TENSOR_PARALLEL)
    cases = list(survey.survey_cases(names))
    modes = {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2}
    assert {case.mode for case in cases} == modes | {ForwardMode.EXTEND, ForwardMode.MIXED}
    assert {case.geometry for case in cases} == set(names)
    assert len(names) == 5
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        for name in names:
            seen = {(case.page_size, case.q_lens[0]) for case in cases if (case.mode, case.geometry) == (mode, name)}
            assert seen == {(page_size, q_len) for page_size in (16, 32, 64, 128) for q_len in range(1, 9)}
    assert {case.geometry for case in cases if case.sliding_window} == {"gpt-oss-120b", "gemma-3-27b"}
    assert len({repr(case) for case in cases}) == len(cases)


@pytest.mark.usefixtures("short_cases")
def test_right_everywhere_exits_0_and_records(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert survey.main(["lab.references", *SMALL, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert set(report["summary"]["modes"]) >= {"DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "EXTEND", "MIXED"}
    assert all(set(counts) == {"right"} for counts in report["summary"]["modes"].values())
    assert report["environment"]["packages"]["torch"]
    assert len(report["verdicts"]) == sum(counts["right"] for counts in report["summary"]["modes"].values())


@pytest.mark.usefixtures("short_cases")
def test_a_wrong_one_exits_1_and_is_recorded_with_its_reproduction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(**arguments: object) -> None:
        arguments["out"].zero_()  # type: ignore[attr-defined]

    out = tmp_path / "report.json"
    assert survey.main([module("zeros", monkeypatch, zeros), *SMALL, "--out", str(out)]) == 1
    wrong = json.loads(out.read_text())["verdicts"]
    assert all(verdict["outcome"] == "wrong" for verdict in wrong)
    assert all("judge_forward" in verdict["reproduce"] for verdict in wrong)


@pytest.mark.usefixtures("short_cases")
def test_an_error_is_recorded_and_the_survey_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(**arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    out = tmp_path / "report.json"
    assert survey.main([module("crashing", monkeypatch, crash), *SMALL, "--out", str(out)]) == 1
    verdicts = json.loads(out.read_text())["verdicts"]
    assert len(verdicts) > 10
    assert all(verdict["outcome"] == "failed" and "illegal memory access" in verdict["reason"] for verdict in verdicts)


@pytest.mark.usefixtures("short_cases")
def test_nothing_judged_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def decline(**arguments: object) -> None:
        raise NotImplementedError("not here")

    assert survey.main([module("declining", monkeypatch, decline), *SMALL]) == 1
