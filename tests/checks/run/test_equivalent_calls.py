"""What a kernel refuses in one spelling is judged in an equal one; as FlashInfer's XQA, which wants a mask."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import E4M3, AttentionCall
from lab.checks import AttentionCase, ForwardCase, HeadPages, Outcome, RaggedCase, judge, judge_case, judge_forward
from lab.checks.run.support_protocol import KernelCalls, Unsupported
from lab.metadata import ForwardMode
from lab.workloads.inputs.attention import build_attention
from lab.workloads.inputs.ragged import build_ragged
from tests.checks.small import SMALL, declining_if, decoding

CPU = torch.device("cpu")
right = references.trtllm_batch_decode_with_kv_cache
CASE = AttentionCase(AttentionCall.DECODE, (20, 33), (4, 4), group=2)
DECODE = ForwardCase(ForwardMode.DECODE, "tiny", (15, 16), (1, 1), page_size=16)
VERIFY = ForwardCase(ForwardMode.TARGET_VERIFY, "tiny", (13, 16), (4, 4), page_size=16)


def xqa(
    query: Any, kv_cache: Any, workspace_buffer: torch.Tensor, *args: Any, bmm2_scale: Any = 1.0, **given: Any
) -> Any:
    """As FlashInfer's decode on an H200: several rows want a mask, and V's scale is left out."""
    workspace_buffer.view(torch.uint8)
    if given.get("return_lse") or given.get("lse") is not None:
        raise NotImplementedError("xqa backend does not support return_lse/lse output")
    if given.get("cum_seq_lens_q") is not None:
        raise ValueError("xqa backend does not support cum_seq_lens_q")
    if (given.get("q_len_per_req") or 1) > 1 and given.get("mask") is None:
        raise AssertionError("Mask is required for speculative decoding")
    return right(query, kv_cache, workspace_buffer, *args, **given)


XQA = decoding(xqa)


def with_required_out(query: Any, kv_cache: Any, *, out: torch.Tensor, return_lse: bool = False, **given: Any) -> None:
    if return_lse:
        raise NotImplementedError("no LSE")
    out.copy_(right(query, kv_cache, **given))


def without_workspace_and_bound(
    query: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, bmm1_scale: float, bmm2_scale: float,
    q_len_per_req: int = 1,
) -> Any:  # fmt: skip
    given = (block_tables, seq_lens, int(seq_lens.max()), bmm1_scale, bmm2_scale)
    return right(query, kv_cache, None, *given, q_len_per_req=q_len_per_req)


@pytest.mark.parametrize(
    ("decode", "says"),
    [
        (
            xqa,
            "AssertionError: Mask is required for speculative decoding: judged with the causal mask of its rows instead",
        ),
        (with_required_out, "judged with an output handed out instead"),
        (without_workspace_and_bound, "judged with no workspace_buffer and no max_seq_len instead"),
    ],
)
def test_a_kernel_that_needs_another_spelling_is_judged_in_it(decode: Any, says: str) -> None:
    verdict = judge_case(decoding(decode), "K1", CASE, "cpu")
    assert verdict.outcome is Outcome.RIGHT
    assert says in verdict.judged.declines[0]


def test_a_block_sparse_call_that_is_refused_gets_no_mask() -> None:
    verdict = judge_case(XQA, "K1", replace(CASE, head_pages=HeadPages.HALF), "cpu")
    assert verdict.outcome is Outcome.DECLINED
    assert verdict.judged.declines == ("AssertionError: Mask is required for speculative decoding",)


def test_the_finding_of_flashinfer_s_decode_is_what_shows() -> None:
    """bmm2_scale is left out: four probes and K1's small outputs vary it, and nothing else is wrong or fails."""
    report = judge(
        XQA, ranges=replace(SMALL, q_lens=(1, 4)), device="cpu", drawn=0, only=["K1", "K8", "K10", "K11", "K13"]
    )
    assert {row.check for row in report.rows if row.outcome is Outcome.WRONG} == {"K1", "K11"}
    assert {row.outcome for row in report.rows} == {Outcome.RIGHT, Outcome.WRONG}
    wrong = {sentence.split(":")[0] for verdict in report.wrong for sentence in verdict.judged.wrongs}
    of_scale = {"bmm2_scale", "bmm2_scale as a tensor", "bmm2_scale below 0"}
    assert wrong == {*of_scale, "an e4m3 output of large values", "a small e4m3 output of loud values"}


@pytest.mark.parametrize("case", [DECODE, VERIFY])
def test_an_engine_s_pass_has_a_workspace_and_a_mask(case: ForwardCase) -> None:
    verdict = judge_forward(XQA, case, "cpu")
    assert verdict.outcome is Outcome.RIGHT, str(verdict)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_an_output_that_is_handed_out_has_the_shape_and_the_dtype_of_the_call(dtype: torch.dtype) -> None:
    """MLA and ragged calls have values of another width than queries, and return bfloat16 for queries of e4m3."""
    sizes = {"num_kv_heads": 1, "head_dim": 80, "v_head_dim": 64}
    mla = AttentionCase(AttentionCall.MLA_DECODE, (20, 33), (1, 1), **sizes, dtype=dtype, kv_dtype=dtype)
    ragged = RaggedCase((0, 7), (5, 3), head_dim=48, v_head_dim=32, dtype=dtype)
    for inputs in (build_attention(mla, CPU), build_ragged(ragged, CPU)):
        arguments = inputs.arguments()

        def handed(*, out: torch.Tensor | None = None, **given: Any) -> Any:
            if out is None:
                raise Unsupported("it needs out")
            return out

        out = KernelCalls(None, lambda _: None).invoke(inputs.interface, handed, arguments)
        assert (out.dtype, out.shape) == (torch.bfloat16, (*arguments["query"].shape[:-1], inputs.out_head_dim))


def test_a_kernel_without_sinks_window_and_out_runs_in_an_engine_s_pass() -> None:
    def decode(
        query: Any, kv_cache: Any, workspace_buffer: Any, block_tables: Any, seq_lens: Any, max_seq_len: int,
        bmm1_scale: float, bmm2_scale: float, q_len_per_req: int,
    ) -> Any:  # fmt: skip
        return right(
            query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale,
            q_len_per_req=q_len_per_req,
        )  # fmt: skip

    case = replace(VERIFY, geometry="llama-3.1-8b", tensor_parallel=8)
    verdict = judge_forward(decoding(decode), case, "cpu")
    assert verdict.outcome is Outcome.RIGHT, str(verdict)
    assert "judged with its result copied into the output instead" in verdict.judged.declines[0]


def test_a_refusal_names_no_argument_that_may_be_left_out() -> None:
    def decode(
        query: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, bmm1_scale: float, bmm2_scale: float
    ) -> None:
        raise NotImplementedError("not on a Tuesday")

    (declined,) = judge_case(decoding(decode), "K1", replace(CASE, q_lens=(1, 1)), "cpu").judged.declines
    assert declined == "not on a Tuesday"


def test_a_refusal_of_every_spelling_is_the_first_one() -> None:
    def decode(**given: Any) -> None:
        raise NotImplementedError("with a mask too" if "mask" in given else "no")

    verdict = judge_case(decoding(decode), "K1", CASE, "cpu")
    assert (verdict.outcome, verdict.judged.declines) == (Outcome.DECLINED, ("no",))


def test_a_check_that_hands_out_an_output_is_not_judged_without() -> None:
    def decode(query: Any, kv_cache: Any, **given: Any) -> Any:
        if "out" in given:
            raise TypeError("unexpected argument 'out'")
        return right(query, kv_cache, **given)

    declines = judge_case(decoding(decode), "K5", CASE, "cpu").judged.declines
    assert "out: it does not take these arguments: unexpected argument 'out'" in declines


def test_a_mode_that_needs_the_other_function_alone_is_declined() -> None:
    for offered, other in itertools.permutations((AttentionCall.DECODE, AttentionCall.CONTEXT)):
        one = SimpleNamespace(**{offered.value: getattr(references, offered.value)})
        report = judge(one, only=["M1"], ranges=SMALL, device="cpu", drawn=0)
        found = {(verdict.outcome, verdict.reason) for verdict in report.verdicts}
        assert found <= {(Outcome.RIGHT, ""), (Outcome.DECLINED, f"it has no {other.value}")}
        assert (Outcome.RIGHT, "") in found


def test_a_narrow_kernel_is_judged_on_passes_within_its_axes() -> None:
    """Of head_dim 128 and one row, without sinks and windows: M1 asks for no more, but where a mode has several rows itself."""

    def is_wide(query: torch.Tensor, q_len_per_req: int | None = 1, **given: Any) -> bool:
        return query.shape[-1] != 128 or q_len_per_req != 1 or "sinks" in given or "window_left" in given

    narrow = replace(SMALL, head_dims=(128,), q_lens=(1,))
    verdicts = judge(declining_if(is_wide), only=["M1"], ranges=narrow, device="cpu", drawn=0).verdicts
    declined = [verdict.case for verdict in verdicts if verdict.outcome is Outcome.DECLINED]
    assert {case.mode for case in declined} == {ForwardMode.DRAFT_EXTEND, ForwardMode.RAGGED_VERIFY}
    assert {verdict.outcome for verdict in verdicts} == {Outcome.RIGHT, Outcome.DECLINED}
