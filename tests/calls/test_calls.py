"""Bad input: every row is refused, by every implementation, with words that help, before anything is written."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lab.calls
import lab.kernels.portable
import lab.kernels.trtllm
import lab.references
from lab.calls import CALL_TYPES, DecodeCall, refuse_nan
from lab.calls.arguments import check_head_dim_stride
from lab.calls.problem import mask_words
from tests.calls.breaks import (
    BAD_SKIP_SOFTMAX,
    POISON,
    Bad,
    Breaks,
    assert_refused,
    bad_scales,
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
from tests.dataclass_rules import broken_rules

IMPLEMENTATIONS = {"references": lab.references, "portable": lab.kernels.portable, "trtllm": lab.kernels.trtllm}

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

BAD_OF: dict[tuple[str, ...], list[Bad]] = {
    BOTH: [
        # query
        ("query is a list", value(query=[1.0]), TypeError, ("query", "list")),
        ("query dtype", tensor("query", to(torch.int32)), TypeError, ("query", "int32", "bfloat16")),
        ("query rank", tensor("query", lambda q: q.flatten(1)), ValueError, ("query", "[4, 256]", "head_dim")),
        ("query without heads", tensor("query", lambda q: q[:, :0]), ValueError, ("query", "[4, 0, 64]")),
        ("query without head_dim", tensor("query", lambda q: q[..., :0]), ValueError, ("query", "[4, 4, 0]")),
        ("query stride", tensor("query", stretched), ValueError, ("query", "stride", "contiguous")),
        # kv_cache
        ("cache is a dict", value(kv_cache={}), TypeError, ("kv_cache", "dict")),
        ("three caches", tensor("kv_cache", lambda kv: (*kv, kv[0])), TypeError, ("kv_cache", "pair")),
        ("cache dtype", cache(to(torch.float16)), TypeError, ("kv_cache", "float16", "bfloat16")),
        ("cache rank", cache(lambda kv: kv[0]), ValueError, ("kv_cache", "4-D")),
        ("one cache rank", tensor("kv_cache", lambda kv: kv[0]), ValueError, ("kv_cache", "5-D")),
        (
            "one cache of three",
            value(kv_cache=torch.zeros(9, 3, 2, 16, 64)),
            ValueError,
            ("kv_cache", "[9, 3, 2, 16, 64]"),
        ),
        ("K and V dtypes", cache(to(torch.float16), (1,)), ValueError, ("kv_cache", "bfloat16", "float16")),
        ("K and V shapes", cache(lambda v: v[:-1], (1,)), ValueError, ("kv_cache", "agree")),
        ("cache head_dim", cache(lambda kv: kv[..., :32]), ValueError, ("kv_cache", "head_dim 32", "64")),
        ("K stride", cache(stretched, (0,)), ValueError, ("K of kv_cache", "stride 2", "contiguous")),
        ("V stride", cache(stretched, (1,)), ValueError, ("V of kv_cache", "stride 2", "contiguous")),
        (
            "head counts",
            cache(lambda kv: kv.repeat(1, 2, 1, 1)[:, :3]),
            ValueError,
            ("4 heads", "3 heads", "kv_layout"),
        ),
        ("no K/V heads", cache(lambda kv: kv[:, :0]), ValueError, ("4 heads", "0 heads")),
        ("page size", cache(lambda kv: kv.repeat(1, 1, 3, 1)), ValueError, ("page_size 48", "power of two")),
        ("layout", value(kv_layout="HDN"), ValueError, ("kv_layout", "'HDN'", "NHD")),
        # NVFP4
        ("no scale factors", together(nvfp4(), value(kv_cache_sf=None)), ValueError, ("uint8", "kv_cache_sf")),
        (
            "needless scale factors",
            value(kv_cache_sf=(torch.zeros(1), torch.zeros(1))),
            ValueError,
            ("kv_cache_sf", "bfloat16", "NVFP4"),
        ),
        ("scale factor shape", nvfp4(factors=8), ValueError, ("kv_cache_sf", "4]", "8]")),
        (
            "scale factor dtype",
            together(nvfp4(), tensor("kv_cache_sf", lambda sf: tuple(side.float() for side in sf))),
            TypeError,
            ("kv_cache_sf", "float32", "float8_e4m3fn"),
        ),
        ("NVFP4 head_dim", nvfp4(head_dim=72), ValueError, ("head_dim 72", "multiple of 16")),
        ("NVFP4 page size", nvfp4(page_size=2), ValueError, ("page_size 2", "4 tokens")),
        # page table and lengths
        ("table dtype", tensor("block_tables", to(torch.int64)), TypeError, ("block_tables", "int64", "int32")),
        ("table rank", tensor("block_tables", lambda t: t[0]), ValueError, ("block_tables", "max_num_pages_per_seq")),
        ("table of one", value(uses_shared_paged_kv_idx=False), ValueError, ("block_tables", "[batch_size, 2,")),
        ("table flag", value(uses_shared_paged_kv_idx=None), TypeError, ("uses_shared_paged_kv_idx", "None")),
        ("table stride", tensor("block_tables", stretched), ValueError, ("block_tables", "contiguous")),
        (
            "table too narrow",
            tensor("block_tables", lambda t: t[:, :1].contiguous()),
            ValueError,
            ("seq_lens[0] = 20 needs 2 pages of 16", "block_tables", "1 columns"),
        ),
        ("lengths dtype", tensor("seq_lens", to(torch.int64)), TypeError, ("seq_lens", "int64", "int32")),
        ("lengths rank", tensor("seq_lens", lambda n: n.unsqueeze(1)), ValueError, ("seq_lens", "[2]", "[2, 1]")),
        ("lengths of three", tensor("seq_lens", lambda n: n.repeat(2)[:3]), ValueError, ("seq_lens", "[2]", "[3]")),
        ("negative length", entry("seq_lens", (1,), -3), ValueError, ("seq_lens[1] = -3", "negative")),
        ("length beyond the bound", entry("seq_lens", (1,), 21), ValueError, ("seq_lens[1] = 21", "max_seq_len", "20")),
        (
            "negative page id",
            entry("block_tables", (0, 1), -1),
            ValueError,
            ("block_tables", "page id -1", "request 0"),
        ),
        (
            "page id too large",
            entry("block_tables", (1, 0), 99),
            ValueError,
            ("block_tables", "page id 99", "request 1"),
        ),
        (
            "V page id too large",
            together(
                tensor("block_tables", lambda t: t.unsqueeze(1).repeat(1, 2, 1)),
                value(uses_shared_paged_kv_idx=False),
                entry("block_tables", (1, 1, 0), 99),
            ),
            ValueError,
            ("V page id 99", "request 1", "column 0"),
        ),
        # the rule
        ("window", value(window_left=-2), ValueError, ("window_left", "-2", "no window")),
        ("window is a float", value(window_left=3.0), TypeError, ("window_left", "3.0")),
        ("window is a bool", value(window_left=True), TypeError, ("window_left", "True")),
        # sinks and scales
        ("sinks dtype", value(sinks=torch.zeros(4).bfloat16()), TypeError, ("sinks", "bfloat16", "float32")),
        ("sinks shape", value(sinks=torch.zeros(2, 2)), ValueError, ("sinks", "[4]", "[2, 2]")),
        ("sinks of K/V heads", value(sinks=torch.zeros(2)), ValueError, ("sinks", "[4]", "[2]")),
        ("sinks in a list", value(sinks=[torch.zeros(4)]), TypeError, ("sinks", "list")),
        *bad_scales("bmm1_scale", "bmm2_scale"),
        # results
        ("out shape", tensor("out", lambda out: out[:3]), ValueError, ("out", "[4, 4, 64]", "[3, 4, 64]")),
        ("out flat", tensor("out", lambda out: out.flatten(1)), ValueError, ("out", "[4, 4, 64]", "[4, 256]")),
        ("out dtype", tensor("out", to(torch.int32)), TypeError, ("out", "int32", "bfloat16")),
        ("out stride", tensor("out", stretched), ValueError, ("out", "contiguous")),
        ("out is a list", value(out=[]), TypeError, ("out", "list")),
        (
            "out and out_dtype",
            value(out_dtype=torch.float16),
            ValueError,
            ("out is", "bfloat16", "out_dtype", "float16"),
        ),
        ("out_dtype", value(out=None, out_dtype=torch.int8), TypeError, ("out_dtype", "int8")),
        ("out_dtype is a word", value(out=None, out_dtype="bf16"), TypeError, ("out_dtype", "'bf16'")),
        ("lse dtype", value(lse=torch.zeros(4, 4).double()), TypeError, ("lse", "float64", "float32")),
        ("lse shape", value(lse=torch.zeros(4, 2)), ValueError, ("lse", "[4, 4]", "[4, 2]")),
        ("lse expanded", value(lse=torch.zeros(1, 4).expand(4, 4)), ValueError, ("lse", "stride (0, 1)", "expanded")),
        ("return_lse", value(return_lse=None), TypeError, ("return_lse", "None")),
        # devices
        *elsewhere("block_tables", "seq_lens", "out", "query"),
        ("K elsewhere", cache(to("meta"), (0,)), ValueError, ("kv_cache is on meta", "cpu")),
        ("V elsewhere", cache(to("meta"), (1,)), ValueError, ("kv_cache is on meta", "cpu")),
        ("sinks elsewhere", value(sinks=torch.zeros(4, device="meta")), ValueError, ("sinks is on meta",)),
        ("lse elsewhere", value(lse=torch.zeros(4, 4, device="meta")), ValueError, ("lse is on meta",)),
        ("scale elsewhere", value(bmm2_scale=torch.ones(1, device="meta")), ValueError, ("bmm2_scale is on meta",)),
        # backends, and what the lab does not model
        ("backend", value(backend="fa3"), ValueError, ("backend='fa3'", "trtllm-gen")),
        ("backend cake", value(backend="cake"), NotImplementedError, ("backend='cake'", "trtllm-gen")),
        ("out_dtype nvfp4", value(out=None, out_dtype="nvfp4"), NotImplementedError, ("out_dtype='nvfp4'",)),
        ("o_sf_scale", value(o_sf_scale=1.0), ValueError, ("o_sf_scale=1.0", "out_dtype='nvfp4'")),
        ("o_sf_vec_size", value(o_sf_vec_size=16), ValueError, ("o_sf_vec_size=16", "out_dtype='nvfp4'")),
        *BAD_SKIP_SOFTMAX,
        # contents that make every result NaN
        ("NaN sink", value(sinks=torch.tensor([0, math.nan, 0, 0])), ValueError, ("sinks[1] is nan",)),
        (
            "infinite sink",
            value(sinks=torch.tensor([-math.inf, 0, math.inf, 0])),
            ValueError,
            ("sinks[2] is inf", "finite, or minus infinity"),
        ),
        ("NaN scale", value(bmm2_scale=torch.tensor([math.nan])), ValueError, ("bmm2_scale must be finite, got nan",)),
        ("infinite scale", value(bmm1_scale=torch.tensor(math.inf)), ValueError, ("bmm1_scale", "finite", "inf")),
        # the call itself
        ("unknown argument", value(windows_left=3), TypeError, ("windows_left",)),
    ],
    ("decode",): [
        # query
        ("rows", tensor("query", lambda q: q[:3]), ValueError, ("query has 3 rows", "q_len_per_req=2", "4")),
        # NVFP4
        ("NVFP4 backend", nvfp4(backend="auto"), ValueError, ("backend='auto'", "'xqa'")),
        # page table and lengths
        ("bound too low", value(max_seq_len=19), ValueError, ("seq_lens[0] = 20", "max_seq_len", "19")),
        ("negative bound", value(max_seq_len=-1), ValueError, ("max_seq_len", "-1")),
        ("bound is a tensor", value(max_seq_len=torch.tensor(20)), TypeError, ("max_seq_len", "int")),
        # query lengths
        ("q_len_per_req of 0", value(q_len_per_req=0), ValueError, ("q_len_per_req", "0")),
        ("q_len_per_req missing", value(q_len_per_req=None), TypeError, ("q_len_per_req", "cum_seq_lens_q")),
        ("q_len_per_req is a float", value(q_len_per_req=2.0), TypeError, ("q_len_per_req", "2.0")),
        ("wrong q_len_per_req", value(q_len_per_req=3), ValueError, ("q_len_per_req=3", "6 rows")),
        (
            "q_len_per_req with cum_seq_lens_q",
            together(RAGGED, value(q_len_per_req=2)),
            ValueError,
            ("q_len_per_req=2", "cum_seq_lens_q", "q_len_per_req=None"),
        ),
        ("max_q_len alone", value(max_q_len=2), ValueError, ("max_q_len=2", "cum_seq_lens_q")),
        ("max_q_len missing", together(RAGGED, value(max_q_len=None)), TypeError, ("max_q_len", "None")),
        ("max_q_len too low", together(RAGGED, value(max_q_len=1)), ValueError, ("max_q_len = 1", "2 rows")),
        # mask
        ("mask dtype", mask(2, 2, 2, dtype=torch.int32), TypeError, ("mask", "int32", "uint16")),
        ("mask words", mask(2, 2, 1), ValueError, ("mask", "[2, 2, 2]", "[2, 2, 1]")),
        ("mask rows", mask(2, 3, 2), ValueError, ("mask", "[2, 2, 2]", "[2, 3, 2]")),
        ("mask batch", mask(1, 2, 2), ValueError, ("mask", "[2, 2, 2]", "[1, 2, 2]")),
        ("mask rank", mask(4, 2), ValueError, ("mask", "[4, 2]")),
        ("mask is a list", value(mask=[1]), TypeError, ("mask", "list")),
        (
            "mask of ragged rows",
            together(RAGGED, mask(2, 2, 2)),
            NotImplementedError,
            ("mask", "cum_seq_lens_q", "q_len_per_req"),
        ),
        # sinks and scales
        ("log2 scale is a number", value(bmm1_scale_log2=1.0), TypeError, ("bmm1_scale_log2", "float")),
        ("log2 scale shape", value(bmm1_scale_log2=torch.ones(2)), TypeError, ("bmm1_scale_log2", "[2]")),
        # block-sparse attention
        ("block sparse is a number", value(enable_block_sparse_attention=1), TypeError, ("enable_block_sparse", "1")),
        (
            "one table for all heads",
            value(enable_block_sparse_attention=True),
            ValueError,
            ("[num_kv_heads, batch_size",),
        ),
        (
            "tables of three heads",
            together(BLOCK_SPARSE, tensor("block_tables", lambda t: t.repeat(2, 1, 1)[:3])),
            ValueError,
            ("block_tables has 3 page tables", "2 heads"),
        ),
        (
            "one head's lengths",
            together(BLOCK_SPARSE, tensor("seq_lens", lambda n: n[0])),
            ValueError,
            ("seq_lens", "[2, 2]", "[2]"),
        ),
        (
            "block-sparse table rows apart",
            together(BLOCK_SPARSE, tensor("block_tables", lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]])),
            ValueError,
            ("block_tables must be contiguous", "enable_block_sparse_attention"),
        ),
        (
            "block-sparse lengths apart",
            together(BLOCK_SPARSE, tensor("seq_lens", lambda n: n.repeat(1, 2)[:, :2])),
            ValueError,
            ("seq_lens must be contiguous",),
        ),
        (
            "a head's length beyond its table",
            together(BLOCK_SPARSE, entry("seq_lens", (1, 0), 99), value(max_seq_len=99)),
            ValueError,
            ("K/V head 1", "seq_lens[0] = 99", "widen"),
        ),
        *(
            (f"block-sparse with {name}", together(BLOCK_SPARSE, value(**{name: given})), ValueError, (name, *words))
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
        (
            "log2 scale elsewhere",
            value(bmm1_scale_log2=torch.ones(1, device="meta")),
            ValueError,
            ("bmm1_scale_log2 is on meta",),
        ),
        (
            "mask elsewhere",
            value(mask=torch.zeros(2, 2, 2, dtype=torch.uint16, device="meta")),
            ValueError,
            ("mask is on meta",),
        ),
        # backends, and what the lab does not model
        *not_modelled(request_order=int32(0, 1), request_order_plan=object()),
        ("transform mode", value(bf16q_fp8kv_transform_mode="v_only"), ValueError, ("'k_only'", "'v_only'")),
        ("transform mode is a number", value(bf16q_fp8kv_transform_mode=1), TypeError, ("bf16q_fp8kv", "1")),
        (
            "transform mode of XQA",
            value(bf16q_fp8kv_transform_mode="k_only", backend="xqa"),
            ValueError,
            ("backend is 'xqa' with bf16q_fp8kv_transform_mode", "only trtllm-gen"),
        ),
        ("o_scale", value(o_scale=2.0), ValueError, ("o_scale=2.0", "e4m3 output", "bmm2_scale")),
        ("o_scale tensor", value(o_scale=torch.ones(1)), ValueError, ("o_scale", "number", "bmm2_scale")),
        ("o_scale of 0", value(o_scale=0), ValueError, ("o_scale", "other than 0")),
        ("o_scale is text", value(o_scale="1"), TypeError, ("o_scale", "'1'")),
    ],
    ("context",): [
        # query
        (
            "rows of context",
            together(tensor("query", lambda q: q[:3]), tensor("out", lambda out: out[:3]), value(lse=None)),
            ValueError,
            ("cum_seq_lens_q", "3 query rows", "4"),
        ),
        # page table and lengths
        ("bound too low", value(max_kv_len=19), ValueError, ("seq_lens[0] = 20", "max_kv_len", "19")),
        # query lengths
        ("max_q_len too low", value(max_q_len=1), ValueError, ("max_q_len = 1", "2 rows")),
        ("negative max_q_len", value(max_q_len=-1), ValueError, ("max_q_len", "-1")),
        ("batch_size", value(batch_size=3), ValueError, ("batch_size=3", "block_tables has 2 rows")),
        ("no offsets", value(cum_seq_lens_q=None), TypeError, ("cum_seq_lens_q", "NoneType")),
        ("no K/V offsets", value(cum_seq_lens_kv=None), TypeError, ("cum_seq_lens_kv", "NoneType")),
        ("offsets dtype", tensor("cum_seq_lens_q", to(torch.int64)), TypeError, ("cum_seq_lens_q", "int64")),
        ("offsets of two", tensor("cum_seq_lens_q", lambda c: c[:2]), ValueError, ("cum_seq_lens_q", "[3]")),
        ("offsets decrease", entry("cum_seq_lens_q", (1,), 5), ValueError, ("cum_seq_lens_q", "decreases")),
        ("offsets start", entry("cum_seq_lens_q", (0,), 1), ValueError, ("cum_seq_lens_q", "start at 0")),
        (
            "K/V offsets",
            entry("cum_seq_lens_kv", (1,), 19),
            ValueError,
            ("cum_seq_lens_kv", "[0, 19, 25]", "[0, 20, 25]"),
        ),
        # the rule
        (
            "window without causal rule",
            value(causal=False, window_left=3),
            NotImplementedError,
            ("causal=False", "window_left=3", "window_left=-1"),
        ),
        ("causal is None", value(causal=None), TypeError, ("causal", "None")),
        # devices
        *elsewhere("cum_seq_lens_q", "cum_seq_lens_kv"),
        # backends, and what the lab does not model
        ("backend auto", value(backend="auto"), ValueError, ("backend='auto'", "trtllm-gen")),
        *not_modelled(use_fp16_softmax=True, uses_spcompress=True),
        ("fp16 softmax is a number", value(use_fp16_softmax=1), TypeError, ("use_fp16_softmax", "True, False or None")),
    ],
}
BAD = [(call, row) for calls, rows in BAD_OF.items() for row in rows for call in calls]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("call", "row"), BAD, ids=[f"{call}-{row[0]}" for call, row in BAD])
def test_bad_input_is_refused_before_anything_is_written(implementation: str, call: str, row: Bad) -> None:
    assert_refused(getattr(IMPLEMENTATIONS[implementation], FUNCTIONS[call]), good_arguments(call), row)


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("call", BOTH)
def test_an_empty_batch_returns_empty(implementation: str, call: str) -> None:
    good = good_arguments(call)
    arguments = good | {
        "query": good["query"][:0],
        "out": good["out"][:0],
        "block_tables": good["block_tables"][:0],
        "seq_lens": good["seq_lens"][:0],
        "return_lse": True,
    }
    if call == "context":
        nothing = torch.zeros(1, dtype=torch.int32)
        arguments |= {"batch_size": 0, "max_q_len": 0, "max_kv_len": 0}
        arguments |= {"cum_seq_lens_q": nothing, "cum_seq_lens_kv": nothing}
    out, lse = getattr(IMPLEMENTATIONS[implementation], FUNCTIONS[call])(**arguments)
    assert out is arguments["out"]
    assert lse.shape == (0, 4)


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


def test_mask_words() -> None:
    assert [mask_words(q_len) for q_len in (1, 16, 17, 32, 33, 64, 65)] == [2, 2, 2, 2, 4, 4, 6]


def test_the_stride_of_head_dim_matters_in_one_row_and_not_in_one_element() -> None:
    two = torch.zeros(1, 4, 6)
    check_head_dim_stride("query", two[..., :1])
    with pytest.raises(ValueError, match=r"query: head_dim must be contiguous.*stride 2"):
        check_head_dim_stride("query", two[..., ::2])


@pytest.mark.parametrize("call_type", CALL_TYPES.values())
def test_flashinfers_module_has_the_function(call_type: Any) -> None:
    assert callable(getattr(pytest.importorskip(call_type.module), call_type.function.value))


def test_dataclasses_are_frozen_and_those_with_tensors_or_functions_are_compared_by_identity() -> None:
    assert broken_rules(lab.calls) == []
