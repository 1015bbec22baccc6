"""Bad input: every row is refused, by every implementation, with words that help, before anything is written."""

import math
from collections.abc import Callable

import pytest
import torch

import lab.calls
import lab.kernels.portable
import lab.kernels.trtllm
import lab.references
from lab.calls import DecodeCall, refuse_nan
from lab.calls.arguments import check_head_dim_stride
from tests.calls.breaks import (
    POISON,
    Bad,
    Breaks,
    assert_refused,
    bad_of_every_call,
    bad_offsets,
    elsewhere,
    entry,
    int32,
    not_modelled,
    stretched,
    tensor,
    to,
    together,
    value,
)
from tests.cases import CONTEXT, DECODE, Arguments, context_arguments, decode_arguments, random_batch

IMPLEMENTATIONS = (lab.references, lab.kernels.portable, lab.kernels.trtllm)

FUNCTIONS = {"decode": DECODE, "context": CONTEXT}
BOTH = ("decode", "context")
Q_LEN = 2


def good_arguments(call: str, page_size: int = 16) -> Arguments:
    """Two requests of two rows, 4/2 heads of 64, bf16, into a poisoned `out`."""
    batch = random_batch([Q_LEN, Q_LEN], [20, 5], head_dim=64)
    make = {"decode": decode_arguments, "context": context_arguments}[call]
    out = torch.full((4, 4, 64), POISON, dtype=torch.bfloat16)
    return make(batch, page_size, out=out, out_dtype=None, return_lse=False)


def cache(change: Callable[[torch.Tensor], torch.Tensor], sides: tuple[int, ...] = (0, 1)) -> Breaks:
    def breaks(good: Arguments) -> Arguments:
        return {"kv_cache": tuple(change(side) if i in sides else side for i, side in enumerate(good["kv_cache"]))}

    return breaks


def nvfp4(head_dim: int = 64, page_size: int = 16, factors: int = 4, backend: str = "trtllm-gen") -> Breaks:
    def breaks(good: Arguments) -> Arguments:
        num_pages = good["kv_cache"][0].shape[0] * 16 // page_size
        packed = torch.zeros(num_pages, 2, page_size, head_dim // 2, dtype=torch.uint8)
        scales = torch.zeros(num_pages, 2, page_size, factors).to(torch.float8_e4m3fn)
        columns = -(-20 // page_size)
        query = torch.zeros(4, 4, head_dim, dtype=torch.bfloat16)
        changes: Arguments = {"kv_cache": (packed, packed), "kv_cache_sf": (scales, scales), "backend": backend}
        return changes | {"query": query, "block_tables": torch.zeros(2, columns, dtype=torch.int32), "out": None}

    return breaks


def mask(*shape: int, dtype: torch.dtype = torch.uint16) -> Breaks:
    return value(mask=torch.zeros(shape, dtype=dtype))


RAGGED = value(
    q_len_per_req=None, max_q_len=Q_LEN, cum_seq_lens_q=torch.tensor([0, 2, 4], dtype=torch.int32)
)  # a good decode call of variable query lengths

BLOCK_SPARSE = together(
    value(enable_block_sparse_attention=True),
    tensor("block_tables", lambda table: table.repeat(2, 1, 1)),
    tensor("seq_lens", lambda lengths: lengths.repeat(2, 1)),
)


def sparse(*parts: Breaks) -> Breaks:
    return together(BLOCK_SPARSE, *parts)


BAD_OF: dict[tuple[str, ...], list[Bad]] = {
    BOTH: [
        *bad_of_every_call(),
        # query
        (tensor("query", lambda q: q.flatten(1)), ValueError, "query", "[4, 256]", "head_dim"),
        (tensor("query", lambda q: q[..., :0]), ValueError, "query", "[4, 4, 0]"),
        # kv_cache
        (value(kv_cache={}), TypeError, "kv_cache", "dict"),
        (tensor("kv_cache", lambda kv: (*kv, kv[0])), TypeError, "kv_cache", "pair"),
        (cache(to(torch.float16)), TypeError, "kv_cache", "float16", "bfloat16"),
        (cache(lambda kv: kv[0]), ValueError, "kv_cache", "4-D"),
        (tensor("kv_cache", lambda kv: kv[0]), ValueError, "kv_cache", "5-D"),
        (value(kv_cache=torch.zeros(9, 3, 2, 16, 64)), ValueError, "kv_cache", "[9, 3, 2, 16, 64]"),
        (cache(to(torch.float16), (1,)), ValueError, "kv_cache", "bfloat16", "float16"),
        (cache(lambda v: v[:-1], (1,)), ValueError, "kv_cache", "agree"),
        (cache(lambda kv: kv[..., :32]), ValueError, "kv_cache", "head_dim 32", "64"),
        (cache(stretched, (0,)), ValueError, "K of kv_cache", "stride 2", "contiguous"),
        (cache(stretched, (1,)), ValueError, "V of kv_cache", "stride 2", "contiguous"),
        (cache(lambda kv: kv.repeat(1, 2, 1, 1)[:, :3]), ValueError, "4 heads", "3 heads", "kv_layout"),
        (cache(lambda kv: kv[:, :0]), ValueError, "4 heads", "0 heads"),
        (cache(lambda kv: kv.repeat(1, 1, 3, 1)), ValueError, "page_size 48", "power of two"),
        (value(kv_layout="HDN"), ValueError, "kv_layout", "'HDN'", "NHD"),
        # NVFP4
        (together(nvfp4(), value(kv_cache_sf=None)), ValueError, "uint8", "kv_cache_sf"),
        (value(kv_cache_sf=(torch.zeros(1), torch.zeros(1))), ValueError, "kv_cache_sf", "bfloat16", "NVFP4"),
        (nvfp4(factors=8), ValueError, "kv_cache_sf", "4]", "8]"),
        (
            together(nvfp4(), tensor("kv_cache_sf", lambda sf: tuple(side.float() for side in sf))),
            TypeError,
            "kv_cache_sf",
            "float32",
            "float8_e4m3fn",
        ),
        (nvfp4(head_dim=72), ValueError, "head_dim 72", "multiple of 16"),
        (nvfp4(page_size=2), ValueError, "page_size 2", "4 tokens"),
        # page table and lengths
        (tensor("block_tables", to(torch.int64)), TypeError, "block_tables", "int64", "int32"),
        (tensor("block_tables", lambda t: t[0]), ValueError, "block_tables", "max_num_pages_per_seq"),
        (value(uses_shared_paged_kv_idx=False), ValueError, "block_tables", "[batch_size, 2,"),
        (value(uses_shared_paged_kv_idx=None), TypeError, "uses_shared_paged_kv_idx", "None"),
        (tensor("block_tables", stretched), ValueError, "block_tables", "contiguous"),
        (
            together(tensor("block_tables", lambda t: t[:, :1].contiguous()), entry("seq_lens", (0,), 32)),
            ValueError,
            "seq_lens[0] = 32 needs 2 pages of 16",
            "block_tables",
            "1 columns",
        ),
        (tensor("seq_lens", lambda n: n.unsqueeze(1)), ValueError, "seq_lens", "[2]", "[2, 1]"),
        (entry("seq_lens", (1,), 21), ValueError, "seq_lens[1] = 21", "max_seq_len", "20"),
        (entry("block_tables", (0, 1), -1), ValueError, "block_tables", "page id -1", "request 0"),
        (entry("block_tables", (1, 0), 99), ValueError, "block_tables", "page id 99", "request 1"),
        (
            together(
                tensor("block_tables", lambda t: t.unsqueeze(1).repeat(1, 2, 1)),
                value(uses_shared_paged_kv_idx=False),
                entry("block_tables", (1, 1, 0), 99),
            ),
            ValueError,
            "V page id 99",
            "request 1",
            "column 0",
        ),
        # the rule
        (value(window_left=-2), ValueError, "window_left", "-2", "no window"),
        (value(window_left=3.0), TypeError, "window_left", "3.0"),
        (value(window_left=True), TypeError, "window_left", "True"),
        # sinks and scales
        (value(sinks=[torch.zeros(4)]), TypeError, "sinks", "list"),
        # results
        (tensor("out", lambda out: out.flatten(1)), ValueError, "out", "[4, 4, 64]", "[4, 256]"),
        (value(out_dtype=torch.float16), ValueError, "out is", "bfloat16", "out_dtype", "float16"),
        (value(out=None, out_dtype=torch.int8), TypeError, "out_dtype", "int8"),
        (value(out=None, out_dtype="bf16"), TypeError, "out_dtype", "'bf16'"),
        (value(lse=torch.zeros(4, 2)), ValueError, "lse", "[4, 4]", "[4, 2]"),
        (value(lse=torch.zeros(1, 4).expand(4, 4)), ValueError, "lse", "stride (0, 1)", "contiguous"),
        (value(lse=torch.zeros(7).as_strided((4, 4), (1, 1))), ValueError, "lse", "stride (1, 1)"),
        # devices
        *elsewhere("block_tables"),
        (cache(to("meta"), (0,)), ValueError, "kv_cache is on meta", "cpu"),
        (cache(to("meta"), (1,)), ValueError, "kv_cache is on meta", "cpu"),
        # backends, and what the lab does not model
        (value(backend="cake"), NotImplementedError, "backend='cake'", "trtllm-gen"),
        (value(out=None, out_dtype="nvfp4"), NotImplementedError, "out_dtype='nvfp4'"),
        (value(o_sf_scale=1.0), ValueError, "o_sf_scale=1.0", "out_dtype='nvfp4'"),
        (value(o_sf_vec_size=16), ValueError, "o_sf_vec_size=16", "out_dtype='nvfp4'"),
    ],
    ("decode",): [
        # query
        (tensor("query", lambda q: q[:3]), ValueError, "query has 3 rows", "q_len_per_req=2", "4"),
        # NVFP4
        (nvfp4(backend="auto"), ValueError, "backend='auto'", "'xqa'"),
        # page table and lengths
        (value(max_seq_len=19), ValueError, "seq_lens[0] = 20", "max_seq_len", "19"),
        (value(max_seq_len=-1), ValueError, "max_seq_len", "-1"),
        (value(max_seq_len=torch.tensor(20)), TypeError, "max_seq_len", "int"),
        # query lengths
        (value(q_len_per_req=0), ValueError, "q_len_per_req", "0"),
        (value(q_len_per_req=None), TypeError, "q_len_per_req", "cum_seq_lens_q"),
        (value(q_len_per_req=2.0), TypeError, "q_len_per_req", "2.0"),
        (value(q_len_per_req=3), ValueError, "q_len_per_req=3", "6 rows"),
        (together(RAGGED, value(q_len_per_req=2)), ValueError, "q_len_per_req=2 contradicts", "q_len_per_req=None"),
        (value(max_q_len=2), ValueError, "max_q_len=2", "cum_seq_lens_q"),
        (together(RAGGED, value(max_q_len=None)), TypeError, "max_q_len", "None"),
        *bad_offsets(lambda **changes: together(RAGGED, value(**changes))),
        # mask
        (mask(2, 2, 2, dtype=torch.int32), TypeError, "mask", "int32", "uint16"),
        (mask(2, 2, 1), ValueError, "mask", "[2, 2, 2]", "[2, 2, 1]"),
        (mask(2, 3, 2), ValueError, "mask", "[2, 2, 2]", "[2, 3, 2]"),
        (mask(1, 2, 2), ValueError, "mask", "[2, 2, 2]", "[1, 2, 2]"),
        (mask(4, 2), ValueError, "mask", "[4, 2]"),
        (value(mask=[1]), TypeError, "mask", "list"),
        (together(RAGGED, mask(2, 2, 2)), NotImplementedError, "mask", "cum_seq_lens_q", "q_len_per_req"),
        # sinks and scales
        (value(bmm1_scale_log2=1.0), TypeError, "bmm1_scale_log2", "float"),
        (value(bmm1_scale_log2=torch.ones(2)), TypeError, "bmm1_scale_log2", "[2]"),
        # block-sparse attention
        (value(enable_block_sparse_attention=1), TypeError, "enable_block_sparse", "1"),
        (value(enable_block_sparse_attention=True), ValueError, "[num_kv_heads, batch_size"),
        (sparse(tensor("block_tables", lambda t: t.repeat(2, 1, 1)[:3])), ValueError, "block_tables has 3 page tables"),
        (sparse(tensor("seq_lens", lambda n: n[0])), ValueError, "seq_lens", "[2, 2]", "[2]"),
        (
            sparse(tensor("block_tables", lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]])),
            ValueError,
            "block_tables must be contiguous",
        ),
        (sparse(tensor("seq_lens", lambda n: n.repeat(1, 2)[:, :2])), ValueError, "seq_lens must be contiguous"),
        (sparse(entry("seq_lens", (1, 0), 99), value(max_seq_len=99)), ValueError, "K/V head 1", "= 99 needs", "widen"),
        *(
            (sparse(value(**{name: given})), ValueError, name, *words)
            for name, given, *words in (
                ("window_left", 3, "is 3 with enable_block_sparse_attention", "no window", "pass -1"),
                ("backend", "xqa", "'xqa'", "only trtllm-gen", "'auto' or 'trtllm-gen'"),
                ("mask", torch.zeros(2, 2, 2, dtype=torch.uint16), "a tensor", "only XQA", "pass None"),
                ("uses_shared_paged_kv_idx", False, "False", "one page id", "pass True"),
                ("skip_softmax_threshold_scale_factor", 0.0, "0.0", "softmax", "pass None"),
                ("causal_seqlens_kv_global", int32(1, 1), "a tensor", "context parallelism", "pass None"),
            )
        ),
        # devices
        (value(bmm1_scale_log2=torch.ones(1, device="meta")), ValueError, "bmm1_scale_log2 is on meta"),
        (value(mask=torch.zeros(2, 2, 2, dtype=torch.uint16, device="meta")), ValueError, "mask is on meta"),
        # backends, and what the lab does not model
        *not_modelled(request_order=int32(0, 1), request_order_plan=object()),
        (value(bf16q_fp8kv_transform_mode="v_only"), ValueError, "'k_only'", "'v_only'"),
        (value(bf16q_fp8kv_transform_mode=1), TypeError, "bf16q_fp8kv", "1"),
        (value(bf16q_fp8kv_transform_mode="k_only", backend="xqa"), ValueError, "'xqa' with bf16q", "only trtllm-gen"),
        (value(o_scale=2.0), ValueError, "o_scale=2.0", "e4m3 output", "bmm2_scale"),
        (value(o_scale=torch.ones(1)), ValueError, "o_scale", "number", "bmm2_scale"),
        (value(o_scale=0), ValueError, "o_scale", "other than 0"),
        (value(o_scale="1"), TypeError, "o_scale", "'1'"),
    ],
    ("context",): [
        # query
        (
            together(tensor("query", lambda q: q[:3]), tensor("out", lambda out: out[:3]), value(lse=None)),
            ValueError,
            "the 3 query rows",
        ),
        # page table and lengths
        (value(max_kv_len=19), ValueError, "seq_lens[0] = 20", "max_kv_len", "19"),
        # query lengths
        *bad_offsets(),
        (value(batch_size=3), ValueError, "batch_size=3", "block_tables has 2 rows"),
        (value(cum_seq_lens_q=None), TypeError, "cum_seq_lens_q", "NoneType"),
        (value(cum_seq_lens_kv=None), TypeError, "cum_seq_lens_kv", "NoneType"),
        (entry("cum_seq_lens_kv", (1,), 19), ValueError, "cum_seq_lens_kv", "[0, 19, 25]", "[0, 20, 25]"),
        # the rule
        (value(causal=False, window_left=3), NotImplementedError, "causal=False", "window_left=3", "window_left=-1"),
        (value(window_left=2**64, max_kv_len=2**64), ValueError, "max_kv_len must be an int64, got an int of 65 bits"),
        (value(causal=False, window_left="3"), TypeError, "window_left must be an int", "'3'"),
        (value(causal=None), TypeError, "causal", "None"),
        # devices
        *elsewhere("cum_seq_lens_kv"),
        # backends, and what the lab does not model
        (value(backend="auto"), ValueError, "backend='auto' is unknown; use trtllm-gen"),
        *not_modelled(use_fp16_softmax=True, uses_spcompress=True),
        (value(use_fp16_softmax=1), TypeError, "use_fp16_softmax", "True, False or None"),
    ],
}
BAD = [(call, row) for calls, rows in BAD_OF.items() for row in rows for call in calls]


@pytest.mark.parametrize(("call", "row"), BAD, ids=[f"{call}-{row[2]}" for call, row in BAD])
def test_bad_input_is_refused_before_anything_is_written(call: str, row: Bad) -> None:
    good = good_arguments(call)
    for implementation in IMPLEMENTATIONS:
        assert_refused(getattr(implementation, FUNCTIONS[call]), good, row)


@pytest.mark.parametrize("call", BOTH)
@pytest.mark.parametrize("variant", ["plain", "ragged", "separate tables", "pages of one token"])
def test_what_the_rows_break_was_good(call: str, variant: str) -> None:
    good = good_arguments(call, 1 if variant == "pages of one token" else 16)
    if variant == "ragged" and call == "decode":
        good |= RAGGED(good)
    if variant == "separate tables":
        good |= {"block_tables": good["block_tables"].unsqueeze(1).repeat(1, 2, 1), "uses_shared_paged_kv_idx": False}
    out = getattr(lab.references, FUNCTIONS[call])(**good)
    assert out is good["out"]
    assert (out != POISON).any(dim=-1).all()


def test_nan_is_refused_on_request() -> None:
    """What a GPU call does not read, `refuse_nan` does."""
    arguments = good_arguments("decode")
    problem = DecodeCall(**arguments).problem()
    refuse_nan(problem)
    arguments["query"][1] = math.nan
    with pytest.raises(ValueError, match="query holds NaN in row 1, of request 0"):
        refuse_nan(problem)


def test_nan_is_allowed_where_nobody_reads_it() -> None:
    """In rows of padding, rows of a request without keys, pages that nobody names; minus infinity is no sink."""
    batch = random_batch([2, 1, 2], [20, 0, 5], head_dim=64)
    arguments = context_arguments(batch, poison=math.nan, sinks=torch.full((4,), -math.inf), out_dtype=torch.bfloat16)
    arguments["query"] = torch.cat((arguments["query"], torch.full((2, 4, 64), math.nan).bfloat16()))
    arguments["query"][2] = math.nan
    out, _ = lab.references.trtllm_batch_context_with_kv_cache(**arguments)
    assert out[:5].isfinite().all()


def test_the_stride_of_head_dim_matters_in_one_row_and_not_in_one_element() -> None:
    two = torch.zeros(1, 4, 6)
    check_head_dim_stride("query", two[..., :1])
    with pytest.raises(ValueError, match=r"query: head_dim must be contiguous.*stride 2"):
        check_head_dim_stride("query", two[..., ::2])
