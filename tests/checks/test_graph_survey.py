"""The graph survey tells every mode's stories, writes a report, and its exit status tells."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lab import references
from lab.checks import graph_survey

ARGUMENTS = ["--geometry", "tiny", "--page-size", "16", "--widths", "3"]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    few = list(graph_survey.survey_cases("tiny", 16, [3]))[::7]
    monkeypatch.setattr(graph_survey, "survey_cases", lambda *_: iter(few))


def test_right_verdicts_are_recorded(tmp_path: Path) -> None:
    out = tmp_path / "graphs.json"
    assert graph_survey.main(["lab.references", *ARGUMENTS, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["captured"] is False
    assert {outcome for counts in report["summary"].values() for outcome in counts} == {"right"}
    assert len(report["verdicts"]) == 8 * 4
    assert {row["mode"] for row in report["verdicts"]} >= {"decode", "draft_extend_v2"}
    assert all(
        {"check", "outcome", "place", "num_tokens_per_req", "sliding_window"} <= set(row) for row in report["verdicts"]
    )


def test_a_wrong_implementation_ends_in_1_and_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ModuleType("wrong_in_graphs")

    def decode(**arguments: object) -> torch.Tensor:
        return references.trtllm_batch_decode_with_kv_cache(**arguments).neg_()  # type: ignore[arg-type]

    wrong.trtllm_batch_decode_with_kv_cache = decode  # type: ignore[attr-defined]
    wrong.trtllm_batch_context_with_kv_cache = references.trtllm_batch_context_with_kv_cache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wrong_in_graphs", wrong)
    assert graph_survey.main(["wrong_in_graphs", *ARGUMENTS]) == 1
    assert "a_b_a is wrong: GraphCase(" in capsys.readouterr().out


def test_nothing_judged_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = ModuleType("declines_everything")

    def decline(**_: object) -> None:
        raise NotImplementedError("not here")

    nothing.trtllm_batch_decode_with_kv_cache = decline  # type: ignore[attr-defined]
    nothing.trtllm_batch_context_with_kv_cache = decline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "declines_everything", nothing)
    assert graph_survey.main(["declines_everything", *ARGUMENTS]) == 1
