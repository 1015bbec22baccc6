"""The judge of MLA passes: a defect of a prefill's metadata or call is found, and a prepared call that keeps contents."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import LATENT_CALLS, AttentionCall
from lab.checks import Contents, Outcome, RaggedCase
from lab.checks.case_run import CaseRun
from lab.checks.properties import mla_modes, mla_prefill
from lab.checks.run.judging import run_case
from lab.metadata.mla.metadata import TRTLLMMLAPrefillMetadata, build_mla_prefill_metadata
from lab.metadata.mla.prefill import prepare_mla_prefill
from lab.ranges import Ranges

CPU = torch.device("cpu")
CASE = RaggedCase((9, 0, 5), (3, 0, 7))
BY_BACKEND = "new tokens as a backend calls it"


def judged() -> list[str]:
    run = CaseRun(references, CASE, CPU)
    mla_prefill.CHECK.judge(run)
    return run.wrongs


def test_the_backends_prefill_is_right() -> None:
    assert judged() == []


def exchanged(*given: Any) -> TRTLLMMLAPrefillMetadata:
    """Build metadata with the lengths of other requests: as many tokens in all."""
    metadata = build_mla_prefill_metadata(*given)
    lens = metadata.seq_lens.flip(0)
    return replace(metadata, seq_lens=lens, cum_seq_lens=torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int())


def expect_wrong_by_the_backend() -> None:
    wrongs = judged()
    assert wrongs
    assert all(wrong.startswith(BY_BACKEND) for wrong in wrongs)


def test_lengths_of_other_requests_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_prefill, "build_mla_prefill_metadata", exchanged)
    expect_wrong_by_the_backend()


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
    expect_wrong_by_the_backend()


def test_what_the_lab_merges_is_of_a_kind_of_its_own() -> None:
    """It follows from the outputs and LSEs that are merged."""
    run = CaseRun(references, replace(CASE, contents=Contents.NEEDLES), CPU)
    mla_prefill.CHECK.judge(run)
    kinds = {result.held for result in run.results if "merged" in result.name}
    assert kinds == {"merged"}
    assert {result.held for result in run.results if result.name == "new tokens"} == {"output", "LSE"}


SIZES = {"num_qo_heads": 2, "kv_lora_rank": 64}


def kernel_of_one_call(interface: AttentionCall, *kept: str) -> Any:
    """Return a kernel with one function and its prepared form, which keeps the contents of the tensors in `kept`."""
    function: Callable[..., Any] = getattr(references, interface.value)

    def prepare(**arguments: Any) -> Callable[[], Any]:
        return partial(function, **arguments | {name: arguments[name].clone() for name in kept})

    return SimpleNamespace(**{interface.value: function, f"prepare_{interface.value}": prepare})


@pytest.mark.parametrize("interface", LATENT_CALLS)
@pytest.mark.parametrize(("kept", "outcome"), [((), Outcome.RIGHT), (("query",), Outcome.WRONG)])
def test_a_prepared_call_that_keeps_contents_is_wrong(
    interface: AttentionCall, kept: tuple[str, ...], outcome: Outcome
) -> None:
    of_pages = mla_modes.mla_mode_cases(32, (1,), qk_rope_head_dim=16, **SIZES)
    case = next(of_pages if interface is AttentionCall.MLA_DECODE else mla_modes.two_pool_cases(1, **SIZES))
    kernel = kernel_of_one_call(interface, *kept)
    verdict = run_case(kernel, mla_modes.CHECK, case, CPU, Ranges())
    assert verdict.outcome is outcome, verdict
    assert all(each.startswith("the pass, prepared on other contents: ") for each in verdict.wrongs)
    assert bool(kept) is bool(verdict.wrongs)
