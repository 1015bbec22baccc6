"""What a run holds against a truth: shapes, vectors, LSEs and bits."""

import functools
import gc
import math
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import AttentionCall
from lab.checks import AttentionCase, Level, Outcome
from lab.checks.case_run import CallForm, CaseRun, Result
from lab.checks.properties import k09_replay, k10_metamorphic, k11_sensitivity
from lab.checks.properties.check import Check
from lab.checks.run.judging import run_case
from lab.checks.run.support_protocol import KernelError, Unsupported
from lab.ranges import Ranges
from lab.references.errors import LSE_LOG2_BOUND, Truth
from tests.checks.small import decoding

CASE = AttentionCase(AttentionCall.DECODE, (20, 0, 33), (2, 2, 2), num_kv_heads=1, group=2)


@pytest.fixture
def run() -> CaseRun:
    return CaseRun(decoding(lambda query: query), CASE, torch.device("cpu"))


@pytest.fixture
def truth(run: CaseRun) -> Truth:
    return run.build().truth()


def test_a_trial_keeps_no_tensor_of_a_call() -> None:
    """A cache by address can only be found where a later tensor gets an earlier one's address."""
    run = CaseRun(references, CASE, torch.device("cpu"))
    inputs = run.build()
    run.call(inputs)
    tensors = [weakref.ref(inputs.query), weakref.ref(inputs.seq_lens), weakref.ref(inputs.block_tables)]
    del inputs
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * 3


@pytest.mark.parametrize("is_finished", [True, False])
def test_an_output_that_another_stream_still_writes_is_wrong(
    is_finished: bool, run: CaseRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, out = run.build(), run.build().new_out()
    run.kernel.implementation = decoding(lambda **_: out)
    run.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None if is_finished else out.zero_())
    run.call(inputs)
    said = [] if is_finished else ["its output was still written after the call"]
    assert [each.split(":")[0] for each in run.wrongs] == said
    assert [each.held for each in run.results] == ["other"] * len(said)


def test_outputs_that_are_biased_are_told_and_their_rows_noted(run: CaseRun, truth: Truth) -> None:
    out = truth.expected.clone()
    out[:2] *= 1.006
    run.called = replace(run.called, q_lens=(2, 2, 2))
    run.expect_close("this", Result(out, None), truth)
    assert run.wrongs == [
        "this: all outputs of request 0 are 0.60% too large: factor 1.0060, at most 1.0049 is rounding"
    ]
    assert run.worst_ratio == pytest.approx(0.006 / 0.0049, rel=0.02)
    (result,) = run.results
    assert result.held == "output"
    assert [wrong for _, wrong in result.requests] == [True, False, False]
    assert result.example is not None
    assert re.search(r"\(request 0\), head [01], elements (\d+, ){3}\d+$", result.example.where)


def test_what_a_check_allows_is_allowed(run: CaseRun, truth: Truth) -> None:
    for least_bound, is_wrong in ((0.11, False), (0.09, True)):
        run.expect_close("this", Result(truth.expected * 1.1, None), truth, least_bound=least_bound)
        assert bool(run.wrongs) is is_wrong


NO_DTYPE = "is torch.complex128, which is no floating-point dtype"


@pytest.mark.parametrize("kind", ["output", "merged"])
@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (lambda out, lse: (out * 1.1, lse), ["8 of 12 vectors are wrong"]),
        (lambda out, lse: (out, lse + 1), ["8 LSEs are wrong"]),
        (lambda out, lse: (out + 3j, lse + 3j), [f"the output {NO_DTYPE}", f"the LSE {NO_DTYPE}"]),
        (lambda out, lse: (out[:5], lse), ["the output is [5, 2, 64], not [6, 2, 64]"]),
        (lambda out, lse: (out, lse[:, :1]), ["the LSE is [6, 1], not [6, 2]"]),
    ],
)
def test_an_output_and_an_lse_are_compared_each(
    run: CaseRun, truth: Truth, change: Callable[..., Any], sentences: list[str], kind: str
) -> None:
    run.expect_close("this", Result(*change(truth.expected, truth.lse_log2)), truth, kind=kind)
    assert len(run.wrongs) == len(sentences)
    assert all(wrong.startswith(f"this: {each}") for wrong, each in zip(run.wrongs, sentences, strict=True))


def test_what_is_not_finite_is_told_as_that_and_not_as_an_error(run: CaseRun, truth: Truth) -> None:
    out = truth.expected.clone()
    out[2, 0], out[4, 1, 3] = math.nan, math.inf
    run.expect_close("this", Result(out, None), truth)
    assert "row 2 (request 1) head 0 is not finite (nan): rows that see no key must be zero" in run.wrongs[0]
    assert "row 4 (request 2) head 1 is not finite (inf)" in run.wrongs[0]
    assert "error" not in run.wrongs[0]


@pytest.mark.parametrize(("off", "is_wrong"), [(0.9, False), (-0.9, False), (1.2, True), (-1.2, True)])
def test_an_lse_may_be_off_by_its_bound_either_way(run: CaseRun, truth: Truth, off: float, is_wrong: bool) -> None:
    lse = truth.lse_log2.clone()
    lse[4, 1] += off * LSE_LOG2_BOUND
    run.expect_lse("this", lse, truth)
    assert bool(run.wrongs) is is_wrong
    assert run.worst_ratio == pytest.approx(abs(off), rel=0.02)
    assert all("1 LSEs are wrong: row 4 head 1 is " in wrong for wrong in run.wrongs)
    assert [wrong for _, wrong in run.results[-1].requests] == [False, False, is_wrong]


def test_bits_that_differ_are_wrong_however_small(run: CaseRun) -> None:
    left = torch.zeros(6, 2, 64)
    right = left.clone()
    run.expect_equal_bits("this", Result(left, None), Result(right, None))
    assert not run.wrongs
    right[3, 1, 5] = -0.0
    run.expect_equal_bits("this", Result(left, None), Result(right, None))
    assert run.wrongs == ["this: the bits of rows [3] differ"]
    nan = Result(torch.full((6, 2, 64), math.nan), None)
    run.expect_equal_bits("nan", nan, nan)
    run.expect_equal_bits("that", nan, nan.leading(5))
    assert run.wrongs[1:] == ["that: the output is [6, 2, 64], not [5, 2, 64]"]


def test_the_truth_is_the_case_s_and_not_the_table_s(run: CaseRun) -> None:
    inputs = run.build()
    before = inputs.truth().expected
    inputs.block_tables.zero_()
    assert torch.equal(replace(inputs, k_pages=inputs.k_pages * 0).truth().expected, before)


def refused(*_: object, **__: object) -> None:
    raise NotImplementedError("not today")


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("boom")


# Checks, and a call that each makes which FlashInfer does not exclude.
MADE = {
    k09_replay.CHECK: "an eager call between replays",
    k10_metamorphic.CHECK: "pages with gaps between them",
    k11_sensitivity.CHECK: "lse",
}


@pytest.mark.parametrize("interface", [AttentionCall.DECODE, AttentionCall.MLA_DECODE])
@pytest.mark.parametrize("check", MADE, ids=lambda check: check.key)
def test_the_calls_are_made_that_flashinfer_does_not_exclude(check: Check, interface: AttentionCall) -> None:
    """A kernel need not refuse an excluded call: it may end in an IndexError."""
    right = getattr(references, interface.value)

    @functools.wraps(right)
    def without_checks(*args: object, **arguments: object) -> object:
        try:
            return right(*args, **arguments)
        except (ValueError, NotImplementedError) as error:
            raise IndexError(str(error)) from None

    kernel = SimpleNamespace(**{interface.value: without_checks})
    special = [
        case for case in check.cases(interface, Ranges(), Level.SMOKE) if case.head_pages or case.rank or case.top_k
    ]
    assert special
    for case in special:
        verdict = run_case(kernel, check, case, torch.device("cpu"), Ranges())
        assert verdict.outcome is Outcome.RIGHT, verdict
        assert MADE[check] in {result.name for result in verdict.results}


def test_what_follows_from_a_refusal() -> None:
    run = CaseRun(decoding(refused), CASE, torch.device("cpu"))
    inputs = run.build()
    with pytest.raises(Unsupported, match="not today"):
        run.call(inputs)
    with pytest.raises(Unsupported, match="not today"):
        run.expect_call("this", inputs)
    with pytest.raises(KernelError, match="it refused a call that it had taken before: not today"):
        run.again(inputs)
    assert (run.declines, run.failures) == ([], [])
    assert run.vary("this", inputs) is None
    assert (run.declines, run.failures) == (["this: not today"], [])


def test_what_follows_from_a_failure() -> None:
    run = CaseRun(decoding(broken), CASE, torch.device("cpu"))
    inputs = run.build()
    with pytest.raises(KernelError, match="it raised RuntimeError: boom"):
        run.call(inputs)
    assert run.failures == []
    assert run.vary("this", inputs) is None
    assert (run.declines, run.failures) == ([], ["this: it raised RuntimeError: boom"])
    assert [(each.name, each.wrong) for each in run.results] == [("this", True)]
    assert run.expect_call("that", inputs) is None
    assert len(run.results) == 2


def test_a_variation_is_compared_with_the_truth_or_the_result_that_is_given() -> None:
    run = CaseRun(references, CASE, torch.device("cpu"))
    inputs = run.build()
    assert run.vary("without", inputs) is not None
    assert run.judged == 0
    run.vary("with", inputs, inputs.truth())
    run.vary("another scale", inputs, inputs.truth(), bmm2_scale=2.0 * inputs.bmm2_scale)
    assert run.judged == 2
    assert [sentence.split(":")[0] for sentence in run.wrongs] == ["another scale"]
    first = run.call(inputs)
    run.vary("the same", inputs, first)
    run.vary("other bits", inputs, first, bmm2_scale=2.0 * inputs.bmm2_scale)
    assert run.wrongs[1].startswith("other bits: the bits of rows")
    assert (run.judged, len(run.wrongs)) == (4, 2)


def test_an_engine_leaves_out_what_has_its_default() -> None:
    given: list[dict[str, object]] = []

    def note(**arguments: object) -> torch.Tensor:
        given.append(arguments)
        return torch.zeros(6, 2, 64)

    run = CaseRun(decoding(note), CASE, torch.device("cpu"))
    engine = run.engine(CallForm.WHOLE)
    optional = {"window_left", "sinks", "multi_ctas_kv_counter_buffer"}
    arguments = run.build().arguments() | dict.fromkeys(optional) | {"window_left": -1, "q_len_per_req": None}
    for changes in ({}, dict.fromkeys(optional, 7)):
        engine.trtllm_batch_decode_with_kv_cache(**arguments | changes)
    assert optional.isdisjoint(given[0])
    assert optional <= set(given[1])
    assert given[0]["q_len_per_req"] is None  # the default is 1
    assert given[0]["workspace_buffer"] is given[1]["workspace_buffer"]
    with pytest.raises(Unsupported, match="it has no trtllm_batch_context_with_kv_cache"):
        engine.trtllm_batch_context_with_kv_cache(**arguments)


def test_an_engine_s_preparation_has_the_engine_s_workspace_and_refuses_as_a_call_does() -> None:
    def prepare(workspace_buffer: torch.Tensor, **arguments: object) -> Callable[[], torch.Tensor]:
        return lambda: workspace_buffer if workspace_buffer.any() else refused()

    implementation = decoding(lambda **_: None)
    implementation.prepare_trtllm_batch_decode_with_kv_cache = prepare
    run = CaseRun(implementation, CASE, torch.device("cpu"))
    call = run.engine().prepare_trtllm_batch_decode_with_kv_cache(**run.build().arguments())
    with pytest.raises(Unsupported, match="not today"):
        call()
    assert not hasattr(run.engine(CallForm.WHOLE), "prepare_trtllm_batch_decode_with_kv_cache")


def test_a_failure_is_in_words_once_however_many_calls_share_it(run: CaseRun) -> None:
    for what in ("one", "another"):
        run.fail("it raised RuntimeError: boom", what)
    assert run.failures == ["one: it raised RuntimeError: boom"]
    assert [each.name for each in run.results] == ["one", "another"]


def test_the_first_output_is_kept_as_it_was_if_asked_for(truth: Truth) -> None:
    for saves in (False, True):
        run = CaseRun(references, CASE, torch.device("cpu"), saves_output=saves)
        out = truth.expected.clone()
        run.expect_close("this", Result(out, None), truth)
        out.zero_()
        run.expect_close("that", Result(out, None), truth)
        assert (run.output is not None) is saves
        assert not saves or torch.equal(run.output.tensor(), truth.expected)
