"""The assertion for other people's tests: it passes what is right, names what is wrong, and has the judge's bound."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls import CALL_TYPES, AttentionCall
from lab.calls.problem import E4M3, NVFP4
from lab.checks import AttentionCase, HeadPages, Storage
from lab.references import assert_close_to_reference
from lab.references.assertion import truth_of_problem
from lab.workloads.attention_case import Dead, Entries, TableTail
from lab.workloads.inputs.attention import build_attention
from tests import cases
from tests.cases import decode_arguments, pack_mask, ragged_batch, random_batch

CPU = torch.device("cpu")
DECODE = AttentionCase(AttentionCall.DECODE, (20, 1, 33), (1, 1, 1), num_kv_heads=1, group=2)
CONTEXT = replace(DECODE, interface=AttentionCall.CONTEXT, q_lens=(3, 1, 17))
MLA = replace(
    DECODE, interface=AttentionCall.MLA_DECODE, q_lens=(2, 2, 2), kv_lens=(20, 2, 33), head_dim=80, v_head_dim=64
)
CASES = {
    "decode": DECODE,
    "several rows": replace(DECODE, q_lens=(2, 2, 2)),
    "no key": replace(DECODE, kv_lens=(20, 0, 33)),
    "NHD": replace(DECODE, storage=Storage(kv_layout="NHD", stacked=True)),
    "window and sinks": replace(DECODE, kv_lens=(20, 1, 70), window_left=17, sinks=True),
    "NaN in what is dead": replace(DECODE, storage=Storage(dead=Dead.NAN, table_tail=TableTail.FAR)),
    "fp16": replace(DECODE, dtype=torch.float16, kv_dtype=torch.float16),
    "e4m3 cache": replace(DECODE, kv_dtype=E4M3, window_left=9),
    "NVFP4 cache": replace(DECODE, kv_dtype=NVFP4),
    "block-sparse": replace(DECODE, num_kv_heads=2, group=1, head_pages=HeadPages.HALF, sinks=True),
    "block-sparse, NVFP4": replace(DECODE, num_kv_heads=2, group=1, head_pages=HeadPages.LAST, kv_dtype=NVFP4),
    "context": CONTEXT,
    "context, NVFP4": replace(CONTEXT, kv_dtype=NVFP4),
    "MLA": MLA,
    "MLA, e4m3": replace(MLA, kv_dtype=E4M3, sinks=True),
    "MLA, selected entries": replace(MLA, top_k=8, entries=Entries.MIXED, sinks=True, storage=Storage(dead=Dead.NAN)),
    "MLA, selected entries of e4m3 with lengths": replace(
        MLA,
        kv_dtype=E4M3,
        top_k=8,
        entries=Entries.SHUFFLED,
        top_k_lens=True,
        storage=Storage(table_tail=TableTail.FAR),
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def arguments_of(case: AttentionCase) -> dict[str, Any]:
    return build_attention(case, CPU).arguments()


def kernel_of(case: AttentionCase) -> Any:
    return getattr(references, case.interface.value)


def ragged_arguments(causal: bool = True) -> dict[str, Any]:
    """Two requests of 2 and 3 rows, and a row of padding."""
    batch = ragged_batch([2, 3], [7, 13], heads=(4, 4), dims=(24, 16))
    arguments = cases.ragged_arguments(batch, bmm1_scale=0.2, is_causal=causal)
    del arguments["out"]
    return arguments | {"query": torch.cat((arguments["query"], arguments["query"][:1]))}


def refuses(match: str, *results: Any, error: type[Exception] = AssertionError, **arguments: Any) -> None:
    with pytest.raises(error, match=match):
        assert_close_to_reference(*results, **arguments)


@each_case
def test_a_right_output_passes(case: AttentionCase) -> None:
    arguments = arguments_of(case)
    assert_close_to_reference(kernel_of(case)(**arguments), **arguments)
    out, lse = kernel_of(case)(**arguments, return_lse=True)
    assert_close_to_reference(out, lse, **arguments)
    assert_close_to_reference((out, lse), **arguments, return_lse=True)


@each_case
def test_one_wrong_vector_is_named(case: AttentionCase) -> None:
    arguments = arguments_of(case)
    out = kernel_of(case)(**arguments).contiguous()
    out.view(-1, *out.shape[-2:])[case.q_lens[0], 1, 3] += 2
    with pytest.raises(AssertionError) as found:
        assert_close_to_reference(out, **arguments)
    assert re.match(
        rf"{case.interface.value}: 1 of {sum(case.q_lens) * 2} vectors are wrong, of requests \[1\]: "
        rf"row {case.q_lens[0]} \(request 1\) head 1"
        + (
            r": error [\d.]+, bound 0\.?\d*"
            if case.kv_lens[1] >= case.q_lens[1]
            else r" is not zero \(2\): rows that see no key must be zero"
        ),
        str(found.value),
    )
    assert str(found.value).endswith("\n`lab judge` with the kernel's module or file finds which other calls are wrong")


@each_case
def test_the_bound_is_the_judge_s(case: AttentionCase) -> None:
    inputs = build_attention(case, CPU)
    judges = inputs.truth()
    call = CALL_TYPES[AttentionCall(case.interface.value)]
    problem = call(**inputs.arguments()).problem()
    mine = truth_of_problem(problem)
    torch.testing.assert_close(mine.expected, judges.expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(mine.control, judges.control)
    torch.testing.assert_close(mine.lse_log2, judges.lse_log2)
    assert mine.request_of_row.tolist() == judges.request_of_row.tolist()
    chosen = (2, 0)
    rows = torch.cat([(mine.request_of_row == request).nonzero().flatten() for request in chosen])
    torch.testing.assert_close(truth_of_problem(problem, requests=chosen).expected, mine.expected[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_are_held_to_float32_s_precision(dtype: torch.dtype) -> None:
    arguments = decode_arguments(random_batch([1, 1], [20, 33], dtype=dtype), bmm1_scale=0.25)
    out, lse = references.trtllm_batch_decode_with_kv_cache(**arguments)
    assert_close_to_reference(out, lse, **arguments)
    refuses("vectors are wrong", out * (1 + 1e-5), **arguments)


@pytest.mark.parametrize("causal", [True, False])
def test_the_ragged_call_s_padding_may_hold_anything(causal: bool) -> None:
    arguments = ragged_arguments(causal)
    out, lse = references.trtllm_ragged_attention_deepseek(**arguments)
    out[5:], lse[5:] = math.nan, math.nan
    assert_close_to_reference(out, lse, **arguments)
    lse[4, 2] += 0.1
    refuses("1 LSEs are wrong: row 4 head 2 is ", out, lse, **arguments)
    refuses("vectors are wrong", out, **arguments | {"is_causal": not causal})


def test_a_draft_mask_is_held_to() -> None:
    """Two branches of a tree: the third token does not see the second."""
    batch = random_batch([3, 3], [20, 33])
    rows = [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    arguments = decode_arguments(batch, bmm1_scale=0.05)
    causal = references.trtllm_batch_decode_with_kv_cache(**arguments)
    arguments |= {"mask": pack_mask([rows, rows])}
    assert_close_to_reference(references.trtllm_batch_decode_with_kv_cache(**arguments), **arguments)
    refuses(r"of requests \[0, 1\]: row [25] ", causal, **arguments)


def test_scales_as_tensors_and_separate_tables() -> None:
    arguments = arguments_of(DECODE)
    scale = torch.tensor([[[[[0.1]]]]])
    arguments |= {"bmm1_scale": scale, "bmm2_scale": scale * 3}
    arguments |= {
        "block_tables": arguments["block_tables"].unsqueeze(1).repeat(1, 2, 1),
        "uses_shared_paged_kv_idx": False,
    }
    assert_close_to_reference(kernel_of(DECODE)(**arguments), **arguments)


def test_a_base_e_lse_and_out_in_rows() -> None:
    arguments = arguments_of(MLA) | {"return_lse": True, "return_lse_base": "basee"}
    out, lse = kernel_of(MLA)(**arguments)
    assert_close_to_reference(out.flatten(0, 1), lse.view(3, 2, -1), **arguments)
    refuses("LSEs are wrong", out, lse / math.log(2.0), **arguments)


def test_buffers_that_were_written_are_the_results_and_stay() -> None:
    arguments = arguments_of(DECODE)
    arguments |= {"out": torch.empty_like(arguments["query"]), "lse": torch.empty(3, 2)}
    out = kernel_of(DECODE)(**arguments)
    out[0] += 1
    before = out.clone()
    refuses("row 0", out, **arguments)
    assert torch.equal(out, before)
    arguments["lse"][2] = 0
    refuses(r"wrong.*\n.*LSEs are wrong: row 2 head 0 is 0, ", out, **arguments)


def test_buffers_that_were_not_written_are_wrong_beside_a_right_result() -> None:
    arguments = arguments_of(DECODE)
    out, lse = kernel_of(DECODE)(**arguments, return_lse=True)
    unwritten = {"out": torch.zeros_like(out), "lse": torch.zeros_like(lse)}
    assert_close_to_reference((out, lse), **arguments | {"out": out.clone(), "lse": lse.clone()})
    refuses(r"the given out: 6 of 6 .*\n.*: 6 LSEs are wrong: row 0 head 0 is 0, ", (out, lse), **arguments | unwritten)


def test_what_is_no_lse_is_named() -> None:
    arguments = arguments_of(DECODE)
    out, lse = kernel_of(DECODE)(**arguments, return_lse=True)
    for wrong, says in (
        (torch.cat((lse, lse)), r"the LSE is \[6, 2\], not \[3, 2\]"),
        (lse.flatten(), r"the LSE is \[6\], not \[3, 2\]"),
        (lse.to("meta"), "the LSE is on meta, not on cpu"),
        (1.0, "the LSE is of type float, not a tensor"),
    ):
        refuses(says, (out, wrong), **arguments)
    refuses("the output is of type tuple, not a tensor", (out, lse, lse), **arguments)


def test_an_output_in_place_of_the_query_is_refused() -> None:
    arguments = arguments_of(DECODE)
    out = kernel_of(DECODE)(**arguments)
    in_place = arguments["query"].copy_(out)
    refuses("out lies in the query's memory", in_place, **arguments, error=ValueError)
    refuses("out shares memory with query", out, **arguments, out=in_place, error=ValueError)


def test_another_dtype_is_an_error_unless_it_is_allowed() -> None:
    arguments = arguments_of(DECODE)
    out = kernel_of(DECODE)(**arguments)
    refuses("arithmetic must be float16, .*int8", out, **arguments, arithmetic=torch.int8, error=TypeError)
    refuses(r"float32, not torch.bfloat16 \(check_dtype=False", out.float(), **arguments)
    assert_close_to_reference(out.float(), check_dtype=False, **arguments)
    assert_close_to_reference(out.half(), **arguments, out_dtype=torch.float16)
    for check_dtype in (True, False):
        refuses("the output is torch.complex64", out.to(torch.complex64) + 3j, **arguments, check_dtype=check_dtype)


def test_a_kernel_s_own_arithmetic_is_allowed_when_it_is_named() -> None:
    case = replace(CASES["e4m3 cache"], window_left=-1)
    arguments = arguments_of(case)
    out = build_attention(replace(case, arithmetic=E4M3), CPU).truth().control
    refuses("vectors are wrong", out, **arguments)
    assert_close_to_reference(out, arithmetic=E4M3, **arguments)


@pytest.mark.parametrize(
    ("out", "says"), [(None, "NoneType, not a tensor"), (torch.zeros(2, 2, 64), r"\[2, 2, 64\], not \[3, 2, 64\]")]
)
def test_what_is_no_output_is_named(out: Any, says: str) -> None:
    refuses(says, out, **arguments_of(DECODE))


def test_a_bias_that_no_vector_shows_is_named() -> None:
    arguments = arguments_of(replace(DECODE, kv_lens=(20, 30, 33), q_lens=(4, 4, 4)))
    out = kernel_of(DECODE)(**arguments)
    refuses(
        r"decode_with_kv_cache: all outputs are 0\.\d\d% too small: factor 0\.99\d\d, at least 0\.99\d\d is rounding",
        out.float() * 0.995,
        **arguments,
        check_dtype=False,
    )


def test_arguments_of_no_call_are_named() -> None:
    arguments = arguments_of(DECODE)
    out = kernel_of(DECODE)(**arguments)
    del arguments["workspace_buffer"]
    assert_close_to_reference(out, **arguments)
    refuses(
        r"the nearest is trtllm_batch_decode_with_kv_cache: got an unexpected keyword .*'sink'",
        out,
        **arguments,
        sink=None,
        error=TypeError,
    )
    del arguments["max_seq_len"]
    refuses(
        r"the nearest is trtllm_batch_decode_with_kv_cache: missing a required .*'max_seq_len'",
        out,
        **arguments,
        error=TypeError,
    )


@pytest.mark.parametrize("window_left", [0, 17])
def test_keys_before_the_window_of_every_row_may_hold_anything(window_left: int) -> None:
    """An engine may have freed their pages. The first row of request 2 sees a key before those of the second row."""
    arguments = arguments_of(replace(DECODE, q_lens=(2, 2, 2), kv_lens=(20, 2, 40), window_left=window_left))
    out = kernel_of(DECODE)(**arguments)
    for key in range(40 - 2 - window_left + 1):
        if key == 40 - 2 - window_left:
            assert_close_to_reference(out, **arguments)
        arguments["kv_cache"][1][arguments["block_tables"][2, key // 16], :, key % 16] = math.nan
    refuses("expected must be finite", out, **arguments, error=ValueError)


def test_an_empty_batch_passes() -> None:
    arguments = ragged_arguments()
    empty = torch.zeros(1, dtype=torch.int32)
    arguments |= {"batch_size": 0, "cum_seq_lens_q": empty, "cum_seq_lens_kv": empty}
    arguments |= {"seq_lens": empty[:0], "max_q_len": 0, "max_kv_len": 0}
    assert_close_to_reference(torch.full((6, 4, 16), math.nan, dtype=torch.bfloat16), **arguments)


def test_requests_without_rows_pass_whatever_the_padding_holds() -> None:
    """A padded batch keeps max_q_len where all requests are idle."""
    arguments = ragged_arguments() | {"cum_seq_lens_q": torch.zeros(3, dtype=torch.int32)}
    padding = torch.full((6, 4, 16), math.nan, dtype=torch.bfloat16)
    assert_close_to_reference(padding, torch.zeros(6, 4), **arguments)
    refuses(r"the LSE is \[5, 4\], not \[6, 4\]", padding, torch.zeros(5, 4), **arguments)


def test_inputs_are_left_as_they_are() -> None:
    arguments = arguments_of(CASES["e4m3 cache"]) | {"window_left": 2}
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    caches = [side.view(torch.uint8).clone() for side in arguments["kv_cache"]]
    assert_close_to_reference(kernel_of(DECODE)(**arguments), **arguments)
    assert all(torch.equal(arguments[name], value) for name, value in before.items())
    assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(arguments["kv_cache"], caches, strict=True))


def test_a_nan_where_the_truth_must_be_is_no_verdict() -> None:
    arguments = arguments_of(DECODE)
    out = kernel_of(DECODE)(**arguments)
    query = arguments["query"].clone()
    query[1, 0, 0] = math.nan
    refuses("query holds NaN in row 1, of request 1", out, **arguments | {"query": query}, error=ValueError)
    fp8 = arguments | {"query": query.to(E4M3), "kv_cache": tuple(side.to(E4M3) for side in arguments["kv_cache"])}
    refuses("query holds NaN in row 1, of request 1", out, **fp8, error=ValueError)
    page = int(arguments["block_tables"][0, 0])
    arguments["kv_cache"][1][page, 0, 0, 0] = math.nan
    refuses("expected must be finite", out, **arguments, error=ValueError)
