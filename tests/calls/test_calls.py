"""Bad input: every row is refused, by every implementation, with words that help, before anything is written."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import lab.kernels.portable
import lab.kernels.trtllm
import lab.references
from lab.calls import ContextCall, DecodeCall
from lab.calls.problem import check_values, mask_words, refuse_nan
from tests.calls.breaks import POISON, Arguments, assert_refused, entry, stretched, tensor, to, together, value
from tests.cases import context_arguments, decode_arguments, random_batch

IMPLEMENTATIONS = {"references": lab.references, "portable": lab.kernels.portable, "trtllm": lab.kernels.trtllm}

FUNCTIONS = {"decode": "trtllm_batch_decode_with_kv_cache", "context": "trtllm_batch_context_with_kv_cache"}
BOTH = ("decode", "context")
Q_LEN = 2


def good_arguments(call: str) -> Arguments:
    """Two requests of two rows, 4/2 heads of 64, bf16, into a poisoned `out`."""
    batch = random_batch([Q_LEN, Q_LEN], [20, 5], head_dim=64)
    make = {"decode": decode_arguments, "context": context_arguments}[call]
    out = torch.full((4, 4, 64), POISON, dtype=torch.bfloat16)
    return make(batch, out=out, out_dtype=None, return_lse=False)


@dataclass(frozen=True)
class Row:
    """`breaks` maps good arguments to those that replace them; the message must hold each of `says`."""

    name: str
    breaks: Callable[[Arguments], Arguments]
    error: type[Exception]
    says: tuple[str, ...]
    calls: tuple[str, ...] = BOTH


def cache(change: Callable[[torch.Tensor], torch.Tensor], sides: tuple[int, ...] = (0, 1)) -> Callable[..., Arguments]:
    def breaks(good: Arguments) -> Arguments:
        return {"kv_cache": tuple(change(side) if i in sides else side for i, side in enumerate(good["kv_cache"]))}

    return breaks


def nvfp4(head_dim: int = 64, page_size: int = 16, factors: int = 4, backend: str = "trtllm-gen") -> Callable[..., Any]:
    def breaks(good: Arguments) -> Arguments:
        num_pages = good["kv_cache"][0].shape[0] * 16 // page_size
        packed = torch.zeros(num_pages, 2, page_size, head_dim // 2, dtype=torch.uint8)
        scales = torch.zeros(num_pages, 2, page_size, factors).to(torch.float8_e4m3fn)
        columns = -(-20 // page_size)
        query = torch.zeros(4, 4, head_dim, dtype=torch.bfloat16)
        changes: Arguments = {"kv_cache": (packed, packed), "kv_cache_sf": (scales, scales), "backend": backend}
        return changes | {"query": query, "block_tables": torch.zeros(2, columns, dtype=torch.int32), "out": None}

    return breaks


def mask(*shape: int, dtype: torch.dtype = torch.uint16) -> Callable[[Arguments], Arguments]:
    return value(mask=torch.zeros(shape, dtype=dtype))


RAGGED = value(
    q_len_per_req=None, max_q_len=Q_LEN, cum_seq_lens_q=torch.tensor([0, 2, 4], dtype=torch.int32)
)  # a good decode call of variable query lengths

BAD = [
    # query
    Row("query is a list", value(query=[1.0]), TypeError, ("query", "list")),
    Row("query dtype", tensor("query", to(torch.int32)), TypeError, ("query", "int32", "bfloat16")),
    Row("query rank", tensor("query", lambda q: q.flatten(1)), ValueError, ("query", "[4, 256]", "head_dim")),
    Row("query without heads", tensor("query", lambda q: q[:, :0]), ValueError, ("query", "[4, 0, 64]")),
    Row("query without head_dim", tensor("query", lambda q: q[..., :0]), ValueError, ("query", "[4, 4, 0]")),
    Row("query stride", tensor("query", stretched), ValueError, ("query", "stride", "contiguous")),
    Row(
        "rows", tensor("query", lambda q: q[:3]), ValueError, ("query has 3 rows", "q_len_per_req=2", "4"), ("decode",)
    ),
    Row(
        "rows of context",
        together(tensor("query", lambda q: q[:3]), tensor("out", lambda out: out[:3]), value(lse=None)),
        ValueError,
        ("cum_seq_lens_q", "3 query rows", "4"),
        ("context",),
    ),
    # kv_cache
    Row("cache is a dict", value(kv_cache={}), TypeError, ("kv_cache", "dict")),
    Row("three caches", tensor("kv_cache", lambda kv: (*kv, kv[0])), TypeError, ("kv_cache", "pair")),
    Row("cache dtype", cache(to(torch.float16)), TypeError, ("kv_cache", "float16", "bfloat16")),
    Row("cache rank", cache(lambda kv: kv[0]), ValueError, ("kv_cache", "4-D")),
    Row("one cache rank", tensor("kv_cache", lambda kv: kv[0]), ValueError, ("kv_cache", "5-D")),
    Row(
        "one cache of three",
        value(kv_cache=torch.zeros(9, 3, 2, 16, 64)),
        ValueError,
        ("kv_cache", "[9, 3, 2, 16, 64]"),
    ),
    Row("K and V dtypes", cache(to(torch.float16), (1,)), ValueError, ("kv_cache", "bfloat16", "float16")),
    Row("K and V shapes", cache(lambda v: v[:-1], (1,)), ValueError, ("kv_cache", "agree")),
    Row("cache head_dim", cache(lambda kv: kv[..., :32]), ValueError, ("kv_cache", "head_dim 32", "64")),
    Row("K stride", cache(stretched, (0,)), ValueError, ("K of kv_cache", "stride 2", "contiguous")),
    Row("V stride", cache(stretched, (1,)), ValueError, ("V of kv_cache", "stride 2", "contiguous")),
    Row("head counts", cache(lambda kv: kv.repeat(1, 2, 1, 1)[:, :3]), ValueError, ("4 heads", "3 heads", "kv_layout")),
    Row("no K/V heads", cache(lambda kv: kv[:, :0]), ValueError, ("4 heads", "0 heads")),
    Row("page size", cache(lambda kv: kv.repeat(1, 1, 3, 1)), ValueError, ("page_size 48", "power of two")),
    Row("layout", value(kv_layout="HDN"), ValueError, ("kv_layout", "'HDN'", "NHD")),
    # NVFP4
    Row("no scale factors", together(nvfp4(), value(kv_cache_sf=None)), ValueError, ("uint8", "kv_cache_sf")),
    Row(
        "needless scale factors",
        value(kv_cache_sf=(torch.zeros(1), torch.zeros(1))),
        ValueError,
        ("kv_cache_sf", "bfloat16", "NVFP4"),
    ),
    Row("scale factor shape", nvfp4(factors=8), ValueError, ("kv_cache_sf", "4]", "8]")),
    Row(
        "scale factor dtype",
        together(nvfp4(), tensor("kv_cache_sf", lambda sf: tuple(side.float() for side in sf))),
        TypeError,
        ("kv_cache_sf", "float32", "float8_e4m3fn"),
    ),
    Row("NVFP4 head_dim", nvfp4(head_dim=72), ValueError, ("head_dim 72", "multiple of 16")),
    Row("NVFP4 page size", nvfp4(page_size=2), ValueError, ("page_size 2", "4 tokens")),
    Row("NVFP4 backend", nvfp4(backend="auto"), ValueError, ("backend='auto'", "'xqa'"), ("decode",)),
    # page table and lengths
    Row("table dtype", tensor("block_tables", to(torch.int64)), TypeError, ("block_tables", "int64", "int32")),
    Row("table rank", tensor("block_tables", lambda t: t[0]), ValueError, ("block_tables", "max_num_pages_per_seq")),
    Row("table of one", value(uses_shared_paged_kv_idx=False), ValueError, ("block_tables", "[batch_size, 2,")),
    Row("table flag", value(uses_shared_paged_kv_idx=None), TypeError, ("uses_shared_paged_kv_idx", "None")),
    Row("table stride", tensor("block_tables", stretched), ValueError, ("block_tables", "contiguous")),
    Row(
        "table too narrow",
        tensor("block_tables", lambda t: t[:, :1].contiguous()),
        ValueError,
        ("seq_lens[0] = 20", "2 pages of 16", "block_tables", "1 columns"),
    ),
    Row("lengths dtype", tensor("seq_lens", to(torch.int64)), TypeError, ("seq_lens", "int64", "int32")),
    Row("lengths rank", tensor("seq_lens", lambda n: n.unsqueeze(1)), ValueError, ("seq_lens", "[2]", "[2, 1]")),
    Row("lengths of three", tensor("seq_lens", lambda n: n.repeat(2)[:3]), ValueError, ("seq_lens", "[2]", "[3]")),
    Row("negative length", entry("seq_lens", (1,), -3), ValueError, ("seq_lens[1] = -3", "negative")),
    Row("length beyond the bound", entry("seq_lens", (1,), 21), ValueError, ("seq_lens[1] = 21", "max_seq_len", "20")),
    Row("bound too low", value(max_seq_len=19), ValueError, ("seq_lens[0] = 20", "max_seq_len", "19"), ("decode",)),
    Row("bound too low", value(max_kv_len=19), ValueError, ("seq_lens[0] = 20", "max_kv_len", "19"), ("context",)),
    Row("negative bound", value(max_seq_len=-1), ValueError, ("max_seq_len", "-1"), ("decode",)),
    Row("bound is a tensor", value(max_seq_len=torch.tensor(20)), TypeError, ("max_seq_len", "int"), ("decode",)),
    Row("negative page id", entry("block_tables", (0, 1), -1), ValueError, ("block_tables", "page id -1", "request 0")),
    Row(
        "page id too large", entry("block_tables", (1, 0), 99), ValueError, ("block_tables", "page id 99", "request 1")
    ),
    Row(
        "V page id too large",
        together(
            tensor("block_tables", lambda t: t.unsqueeze(1).repeat(1, 2, 1)),
            value(uses_shared_paged_kv_idx=False),
            entry("block_tables", (1, 1, 0), 99),
        ),
        ValueError,
        ("V page id 99", "request 1", "column 0"),
    ),
    # query lengths
    Row("q_len_per_req of 0", value(q_len_per_req=0), ValueError, ("q_len_per_req", "0"), ("decode",)),
    Row(
        "q_len_per_req missing", value(q_len_per_req=None), TypeError, ("q_len_per_req", "cum_seq_lens_q"), ("decode",)
    ),
    Row("q_len_per_req is a float", value(q_len_per_req=2.0), TypeError, ("q_len_per_req", "2.0"), ("decode",)),
    Row("wrong q_len_per_req", value(q_len_per_req=3), ValueError, ("q_len_per_req=3", "6 rows"), ("decode",)),
    Row(
        "q_len_per_req with cum_seq_lens_q",
        together(RAGGED, value(q_len_per_req=2)),
        ValueError,
        ("q_len_per_req=2", "cum_seq_lens_q", "q_len_per_req=None"),
        ("decode",),
    ),
    Row("max_q_len alone", value(max_q_len=2), ValueError, ("max_q_len=2", "cum_seq_lens_q"), ("decode",)),
    Row("max_q_len missing", together(RAGGED, value(max_q_len=None)), TypeError, ("max_q_len", "None"), ("decode",)),
    Row(
        "max_q_len too low", together(RAGGED, value(max_q_len=1)), ValueError, ("max_q_len = 1", "2 rows"), ("decode",)
    ),
    Row("max_q_len too low", value(max_q_len=1), ValueError, ("max_q_len = 1", "2 rows"), ("context",)),
    Row("negative max_q_len", value(max_q_len=-1), ValueError, ("max_q_len", "-1"), ("context",)),
    Row("batch_size", value(batch_size=3), ValueError, ("batch_size=3", "block_tables has 2 rows"), ("context",)),
    Row("no offsets", value(cum_seq_lens_q=None), TypeError, ("cum_seq_lens_q", "NoneType"), ("context",)),
    Row("no K/V offsets", value(cum_seq_lens_kv=None), TypeError, ("cum_seq_lens_kv", "NoneType"), ("context",)),
    Row(
        "offsets dtype", tensor("cum_seq_lens_q", to(torch.int64)), TypeError, ("cum_seq_lens_q", "int64"), ("context",)
    ),
    Row(
        "offsets of two", tensor("cum_seq_lens_q", lambda c: c[:2]), ValueError, ("cum_seq_lens_q", "[3]"), ("context",)
    ),
    Row(
        "offsets decrease", entry("cum_seq_lens_q", (1,), 5), ValueError, ("cum_seq_lens_q", "decreases"), ("context",)
    ),
    Row("offsets start", entry("cum_seq_lens_q", (0,), 1), ValueError, ("cum_seq_lens_q", "start at 0"), ("context",)),
    Row(
        "K/V offsets",
        entry("cum_seq_lens_kv", (1,), 19),
        ValueError,
        ("cum_seq_lens_kv", "[0, 19, 25]", "[0, 20, 25]"),
        ("context",),
    ),
    # mask
    Row("mask dtype", mask(2, 2, 2, dtype=torch.int32), TypeError, ("mask", "int32", "uint16"), ("decode",)),
    Row("mask words", mask(2, 2, 1), ValueError, ("mask", "[2, 2, 2]", "[2, 2, 1]"), ("decode",)),
    Row("mask rows", mask(2, 3, 2), ValueError, ("mask", "[2, 2, 2]", "[2, 3, 2]"), ("decode",)),
    Row("mask batch", mask(1, 2, 2), ValueError, ("mask", "[2, 2, 2]", "[1, 2, 2]"), ("decode",)),
    Row("mask rank", mask(4, 2), ValueError, ("mask", "[4, 2]"), ("decode",)),
    Row("mask is a list", value(mask=[1]), TypeError, ("mask", "list"), ("decode",)),
    Row(
        "mask of ragged rows",
        together(RAGGED, mask(2, 2, 2)),
        NotImplementedError,
        ("mask", "cum_seq_lens_q", "q_len_per_req"),
        ("decode",),
    ),
    # the rule
    Row("window", value(window_left=-2), ValueError, ("window_left", "-2", "no window")),
    Row("window is a float", value(window_left=3.0), TypeError, ("window_left", "3.0")),
    Row("window is a bool", value(window_left=True), TypeError, ("window_left", "True")),
    Row(
        "window without causal rule",
        value(causal=False, window_left=3),
        NotImplementedError,
        ("causal=False", "window_left=3", "window_left=-1"),
        ("context",),
    ),
    Row("causal is None", value(causal=None), TypeError, ("causal", "None"), ("context",)),
    # sinks and scales
    Row("sinks dtype", value(sinks=torch.zeros(4).bfloat16()), TypeError, ("sinks", "bfloat16", "float32")),
    Row("sinks shape", value(sinks=torch.zeros(2, 2)), ValueError, ("sinks", "[4]", "[2, 2]")),
    Row("sinks of K/V heads", value(sinks=torch.zeros(2)), ValueError, ("sinks", "[4]", "[2]")),
    Row("sinks in a list", value(sinks=[torch.zeros(4)]), TypeError, ("sinks", "list")),
    *(
        row
        for name in ("bmm1_scale", "bmm2_scale")
        for row in (
            Row(f"{name} is a string", value(**{name: "1"}), TypeError, (name, "'1'")),
            Row(f"{name} is None", value(**{name: None}), TypeError, (name, "None")),
            Row(f"{name} is NaN", value(**{name: math.nan}), ValueError, (name, "nan", "finite")),
            Row(f"{name} dtype", value(**{name: torch.ones(1).double()}), TypeError, (name, "float32", "float64")),
            Row(f"{name} per head", value(**{name: torch.ones(4)}), TypeError, (name, "one element", "[4]")),
        )
    ),
    Row("log2 scale is a number", value(bmm1_scale_log2=1.0), TypeError, ("bmm1_scale_log2", "float"), ("decode",)),
    Row("log2 scale shape", value(bmm1_scale_log2=torch.ones(2)), TypeError, ("bmm1_scale_log2", "[2]"), ("decode",)),
    # results
    Row("out shape", tensor("out", lambda out: out[:3]), ValueError, ("out", "[4, 4, 64]", "[3, 4, 64]")),
    Row("out flat", tensor("out", lambda out: out.flatten(1)), ValueError, ("out", "[4, 4, 64]", "[4, 256]")),
    Row("out dtype", tensor("out", to(torch.int32)), TypeError, ("out", "int32", "bfloat16")),
    Row("out stride", tensor("out", stretched), ValueError, ("out", "contiguous")),
    Row("out is a list", value(out=[]), TypeError, ("out", "list")),
    Row(
        "out and out_dtype", value(out_dtype=torch.float16), ValueError, ("out is", "bfloat16", "out_dtype", "float16")
    ),
    Row("out_dtype", value(out=None, out_dtype=torch.int8), TypeError, ("out_dtype", "int8")),
    Row("out_dtype is a word", value(out=None, out_dtype="bf16"), TypeError, ("out_dtype", "'bf16'")),
    Row("lse dtype", value(lse=torch.zeros(4, 4).double()), TypeError, ("lse", "float64", "float32")),
    Row("lse shape", value(lse=torch.zeros(4, 2)), ValueError, ("lse", "[4, 4]", "[4, 2]")),
    Row("lse expanded", value(lse=torch.zeros(1, 4).expand(4, 4)), ValueError, ("lse", "stride (0, 1)", "expanded")),
    Row("return_lse", value(return_lse=None), TypeError, ("return_lse", "None")),
    # devices
    *(
        Row(f"{name} elsewhere", tensor(name, to("meta")), ValueError, (f"{name} is on meta", "cpu"))
        for name in ("block_tables", "seq_lens", "out")
    ),
    *(
        Row(f"{name} elsewhere", tensor(name, to("meta")), ValueError, (f"{name} is on meta", "cpu"), ("context",))
        for name in ("cum_seq_lens_q", "cum_seq_lens_kv")
    ),
    Row("query elsewhere", tensor("query", to("meta")), ValueError, ("query is on meta", "cpu")),
    Row("K elsewhere", cache(to("meta"), (0,)), ValueError, ("kv_cache is on meta", "cpu")),
    Row("V elsewhere", cache(to("meta"), (1,)), ValueError, ("kv_cache is on meta", "cpu")),
    Row("sinks elsewhere", value(sinks=torch.zeros(4, device="meta")), ValueError, ("sinks is on meta",)),
    Row("lse elsewhere", value(lse=torch.zeros(4, 4, device="meta")), ValueError, ("lse is on meta",)),
    Row("scale elsewhere", value(bmm2_scale=torch.ones(1, device="meta")), ValueError, ("bmm2_scale is on meta",)),
    Row(
        "log2 scale elsewhere",
        value(bmm1_scale_log2=torch.ones(1, device="meta")),
        ValueError,
        ("bmm1_scale_log2 is on meta",),
        ("decode",),
    ),
    Row(
        "mask elsewhere",
        value(mask=torch.zeros(2, 2, 2, dtype=torch.uint16, device="meta")),
        ValueError,
        ("mask is on meta",),
        ("decode",),
    ),
    # backends, and what the lab does not model
    Row("backend", value(backend="fa3"), ValueError, ("backend='fa3'", "trtllm-gen")),
    Row("backend auto", value(backend="auto"), ValueError, ("backend='auto'", "trtllm-gen"), ("context",)),
    Row("backend cake", value(backend="cake"), NotImplementedError, ("backend='cake'", "trtllm-gen")),
    Row("out_dtype nvfp4", value(out=None, out_dtype="nvfp4"), NotImplementedError, ("out_dtype='nvfp4'",)),
    *(
        Row(name, value(**{name: argument}), NotImplementedError, (name, "default"), calls)
        for name, argument, calls in (
            ("o_sf_scale", 1.0, BOTH),
            ("o_sf_vec_size", 16, BOTH),
            ("skip_softmax_threshold_scale_factor", 1.0, BOTH),
            ("skip_softmax_threshold_scale_factor", 0.0, BOTH),
            ("use_fp16_softmax", True, ("context",)),
            ("use_fp16_softmax", False, ("context",)),
            ("uses_spcompress", True, ("context",)),
            ("enable_block_sparse_attention", True, ("decode",)),
            ("cp_world", 2, ("decode",)),
            ("cp_rank", 1, ("decode",)),
            ("causal_seqlens_kv_global", torch.tensor([1, 1], dtype=torch.int32), ("decode",)),
            ("bf16q_fp8kv_transform_mode", "k_only", ("decode",)),
            ("request_order", torch.tensor([0, 1], dtype=torch.int32), ("decode",)),
            ("request_order_plan", object(), ("decode",)),
        )
    ),
    Row("o_scale", value(o_scale=2.0), NotImplementedError, ("o_scale=2.0", "bmm2_scale"), ("decode",)),
    Row("o_scale tensor", value(o_scale=torch.ones(2)), NotImplementedError, ("o_scale", "bmm2_scale"), ("decode",)),
    # contents that make every result NaN
    Row("NaN sink", value(sinks=torch.tensor([0, math.nan, 0, 0])), ValueError, ("sinks[1] is nan",)),
    Row(
        "infinite sink",
        value(sinks=torch.tensor([-math.inf, 0, math.inf, 0])),
        ValueError,
        ("sinks[2] is inf", "finite, or minus infinity"),
    ),
    Row("NaN scale", value(bmm2_scale=torch.tensor([math.nan])), ValueError, ("bmm2_scale must be finite, got nan",)),
    Row("infinite scale", value(bmm1_scale=torch.tensor(math.inf)), ValueError, ("bmm1_scale", "finite", "inf")),
    # the call itself
    Row("unknown argument", value(windows_left=3), TypeError, ("windows_left",)),
]
CASES = [
    pytest.param(implementation, call, row, id=f"{implementation}-{call}-{row.name}")
    for implementation in IMPLEMENTATIONS
    for row in BAD
    for call in row.calls
]


@pytest.mark.parametrize(("implementation", "call", "row"), CASES)
def test_bad_input_is_refused_before_anything_is_written(implementation: str, call: str, row: Row) -> None:
    run = getattr(IMPLEMENTATIONS[implementation], FUNCTIONS[call])
    assert_refused(run, good_arguments(call), row.breaks, row.error, row.says)


@pytest.mark.parametrize("call", BOTH)
@pytest.mark.parametrize("variant", ["plain", "ragged", "separate tables"])
def test_what_the_rows_break_was_good(call: str, variant: str) -> None:
    good = good_arguments(call)
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


@pytest.mark.parametrize("call", BOTH)
def test_arguments_that_change_no_result_are_free(call: str) -> None:
    good = good_arguments(call) | {"out": None}
    run = getattr(lab.references, FUNCTIONS[call])
    free = {
        "workspace_buffer": torch.zeros(8, device="meta"),
        "enable_pdl": True,
        "multi_ctas_kv_counter_buffer": torch.zeros(8, device="meta"),
    }
    assert torch.equal(run(**good | free), run(**good))


@pytest.mark.parametrize(("call", "type_"), [("decode", DecodeCall), ("context", ContextCall)])
def test_values_can_be_checked_on_request(call: str, type_: Any) -> None:
    """What a GPU call does not read, `check_values` does."""
    arguments = good_arguments(call)
    problem = type_(**arguments).problem()
    check_values(problem)
    arguments["block_tables"][0, 0] = 1000
    with pytest.raises(ValueError, match="page id 1000"):
        check_values(problem)


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
