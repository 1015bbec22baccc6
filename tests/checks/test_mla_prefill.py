"""The check of a prefill judges the backend's metadata and call together with the kernel: a defect of either is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import lab.references
from lab.checks import Contents, RaggedCase
from lab.checks.case_run import CaseRun
from lab.checks.properties import mla_prefill
from lab.metadata.mla.metadata import TRTLLMMLAPrefillMetadata, build_mla_prefill_metadata
from lab.metadata.mla.prefill import prepare_mla_prefill

CASE = RaggedCase((9, 0, 5), (3, 0, 7))
BY_BACKEND = "new tokens as a backend calls it"


def judged() -> list[str]:
    run = CaseRun(lab.references, CASE, torch.device("cpu"))
    mla_prefill.CHECK.judge(run)
    return run.wrongs


def test_the_backends_prefill_is_right() -> None:
    assert judged() == []


def exchanged(metadata: TRTLLMMLAPrefillMetadata) -> TRTLLMMLAPrefillMetadata:
    """Lengths of other requests: as many tokens in all."""
    lens = metadata.seq_lens.flip(0)
    return replace(metadata, seq_lens=lens, cum_seq_lens=torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int())


def test_lengths_of_other_requests_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mla_prefill, "build_mla_prefill_metadata", lambda *given: exchanged(build_mla_prefill_metadata(*given))
    )
    wrongs = judged()
    assert wrongs
    assert all(wrong.startswith(BY_BACKEND) for wrong in wrongs)


CALL_DEFECTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another scale": lambda given: given | {"bmm1_scale": 0.9 * given["bmm1_scale"]},
    "not causal": lambda given: given | {"is_causal": False},
    "values of other tokens": lambda given: given | {"value": given["value"].roll(1, 0)},
}


@pytest.mark.parametrize("defect", CALL_DEFECTS)
def test_a_defect_of_the_call_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(implementation: Any, *given: Any, **options: Any) -> Callable[[], Any]:
        call = prepare_mla_prefill(implementation, *given, **options)
        return lambda: call.func(**CALL_DEFECTS[defect](call.keywords))  # type: ignore[attr-defined]

    monkeypatch.setattr(mla_prefill, "prepare_mla_prefill", prepared)
    wrongs = judged()
    assert wrongs
    assert all(wrong.startswith(BY_BACKEND) for wrong in wrongs)


def test_what_the_lab_merges_is_of_a_kind_of_its_own() -> None:
    """It follows from the outputs and LSEs that are merged."""
    run = CaseRun(lab.references, replace(CASE, contents=Contents.NEEDLES), torch.device("cpu"))
    mla_prefill.CHECK.judge(run)
    kinds = {result.held for result in run.results if "merged" in result.name}
    assert kinds == {"merged"}
    assert {result.held for result in run.results if result.name == "new tokens"} == {"output", "LSE"}
