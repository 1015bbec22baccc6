"""Define the axes of the decode, context and MLA calls in the sweep (`lab.dry_run.sweep`), and make the calls of points.

An *axis* is an argument of a trtllm-gen call, with values that the kernels support and values that they do not. A *point* has
one value for each axis, and so describes one call. Tensors are not initialised, so large ones take no memory.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from lab.calls import ContextCall, DecodeCall
from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import E4M3, NVFP4_BLOCK, mask_words
from lab.checks.parameters.covering import Constraint, Model, Point

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": E4M3, "nvfp4": torch.uint8, "fp32": torch.float32}
DTYPES |= {"int8": torch.int8}
OUTS = ("fp16", "bf16", "e4m3")
# "query/K and V/output"
PAGED_DTYPES = (
    "bf16/bf16/bf16",
    *(f"{q}/{kv}/{out}" for q in OUTS for kv in dict.fromkeys((q, "e4m3", "nvfp4")) for out in OUTS),
    "bf16/bf16/fp32",
    "fp32/fp32/fp32",
)
GROUPS = (4, 1, 2, 3, 5, 7, 8, 12, 15, 16, 17, 24, 32, 33, 48, 63, 64, 65, 96, 127, 128, 130, 192, 256)
MLA_HEADS = (
    *(128, 1, 3, 7, 8, 9, 12, 16, 17, 20, 31, 32, 33, 48, 63, 64, 65, 96),
    *(127, 129, 130, 160, 192, 224, 256, 512),
)
MOST_ROWS, MOST_HEADS = 600, 512
SOFTMAX_AXES: dict[str, Sequence[Any]] = {
    "sinks": (False, True),
    "scales": ("numbers", "tensors", "log2"),
    "lse": ("none", "returned", "given", "strided"),
    "out": ("none", "given", "8 bytes on"),
}
PAGED_AXES: dict[str, Sequence[Any]] = {
    "dtypes": tuple(dict.fromkeys(PAGED_DTYPES)),
    "head_dim": (128, 16, 32, 64, 80, 96, 112, 132, 160, 192, 256, 512, 576),
    "page_size": (64, 4, 8, 16, 32, 128, 1024),
    "num_kv_heads": (2, 1, 8),
    "group": GROUPS,
    "q_len": (1, 2, 3, 4, 5, 8, 16, 17, 64, 150),
    "batch_size": (2, 1, 3, 17, 64, 300),
    "max_kv_len": (512, 0, 1, 127, 4096, 9000, 131072),
    "window_left": (-1, 0, 20, 126, 511, 4094),
    "tables": ("shared", "separate"),
    "cache": ("HND", "NHD", "stacked HND", "stacked NHD", "K is V"),
    "gap": ("none", *(f"{n} bytes a page" for n in (8, 16, 32)), *(f"{n} elements a token" for n in (4, 16))),
    "v_strides": ("K's", "others"),
    "kv_start": ("aligned", "K 8 bytes on", "V 8 bytes on", "K 16 bytes on", "V 16 bytes on"),
    "factors": ("HND", "NHD", "8 bytes a page", "16 bytes a page", "V 16 bytes a page", "V 8 bytes on"),
    "query": (
        *("packed", "fused", "heads 4 elements apart", "rows 4 elements apart", "rows 16 elements apart"),
        *("expanded", "8 bytes on"),
    ),
    **SOFTMAX_AXES,
}
MLA_AXES: dict[str, Sequence[Any]] = {
    "dtypes": (
        *(f"{dtypes}/bf16" for dtypes in ("bf16/bf16", "e4m3/e4m3", "fp16/fp16", "bf16/e4m3")),
        *("bf16/bf16/fp16", "e4m3/e4m3/e4m3"),
    ),
    "dims": ((512, 64), (256, 64), (512, 0), (128, 64)),
    "page_size": (64, 8, 16, 32, 128),
    "heads": MLA_HEADS,
    "q_len": (1, 2, 4, 9),
    "batch_size": (2, 1, 4, 16, 17, 40),
    "max_kv_len": (512, 0, 1, 700, 4096, 131072),
    "rows": ("uniform", "ragged"),
    "cache": ("4-D", "3-D"),
    "gap": ("none", "8 bytes a page", "16 bytes a page", "4 elements a token", "16 elements a token"),
    "kv_start": ("aligned", "K 8 bytes on", "K 16 bytes on"),
    "query": ("packed", "heads 4 elements apart", "heads 16 elements apart", "expanded", "8 bytes on"),
    **SOFTMAX_AXES,
    "scales": ("numbers", "tensors"),
    "lse": ("none", "returned", "given"),
    "top_k": (0, 64, 2048, 6),
    "lens": (False, True),
}


ROW_IS_A_KEY = Constraint(lambda q_len, max_kv_len: q_len <= max_kv_len or max_kv_len == 0, "a row is a key")
WINDOW_IS_CAUSAL = Constraint(lambda causal, window_left: causal or window_left < 0, "a window is causal")
PAGED_RULES = (
    Constraint(lambda q_len, batch_size: q_len * batch_size <= MOST_ROWS, "too many rows to make"),
    Constraint(lambda num_kv_heads, group: num_kv_heads * group <= MOST_HEADS, "too many heads to make"),
    Constraint(lambda dtypes, head_dim: "nvfp4" not in dtypes or head_dim % NVFP4_BLOCK == 0, "NVFP4 has whole blocks"),
    Constraint(lambda dtypes, page_size: "nvfp4" not in dtypes or page_size >= 4, "V's factors interleave 4 tokens"),
    Constraint(lambda dtypes, factors: "nvfp4" in dtypes or factors == "HND", "they go with NVFP4"),
    ROW_IS_A_KEY,
    Constraint(
        lambda cache, v_strides: cache in ("HND", "NHD") or v_strides == "K's", "one tensor has one set of strides"
    ),
    Constraint(lambda cache, kv_start: cache != "K is V" or "V" not in kv_start, "V begins where K does"),
)
DECODE = Model(
    PAGED_AXES | {"rows": ("uniform", "ragged"), "mask": (False, True), "block_sparse": (False, True)},
    (
        *PAGED_RULES,
        Constraint(lambda mask, rows: not mask or rows == "uniform", "a mask has q_len rows"),
        Constraint(
            lambda block_sparse, mask, window_left, tables: (
                not block_sparse or (not mask and window_left < 0 and tables == "shared")
            ),
            "block-sparse attention has no mask, no window and one table for K and V",
        ),
    ),
    (("dtypes", "head_dim", "page_size"), ("group", "num_kv_heads", "q_len"), ("dtypes", "group", "num_kv_heads")),
)
CONTEXT = Model(
    PAGED_AXES | {"rows": ("ragged",), "causal": (True, False), "scales": ("numbers", "tensors")},
    (*PAGED_RULES, WINDOW_IS_CAUSAL),
    (("dtypes", "head_dim", "page_size"), ("dtypes", "head_dim", "window_left")),
)
MLA_DECODE = Model(
    MLA_AXES,
    (ROW_IS_A_KEY, Constraint(lambda lens, top_k: not lens or top_k > 0, "they count selected entries")),
    (
        ("dtypes", "dims", "heads"),
        ("heads", "dims", "max_kv_len"),
        ("heads", "q_len", "page_size"),
        ("heads", "dtypes", "top_k"),
        ("dims", "top_k", "lens"),
    ),
)


def decode(point: Point) -> DecodeCall:
    batch, q_len = point["batch_size"], point["q_len"]
    given = _paged(point) | {"max_seq_len": point["max_kv_len"], "backend": "trtllm-gen"}
    if point["rows"] == "ragged":
        given |= {"q_len_per_req": None, "max_q_len": q_len, "cum_seq_lens_q": offsets_of(batch, q_len)}
    else:
        given["q_len_per_req"] = q_len
    if point["mask"]:
        given["mask"] = torch.ones(batch, q_len, mask_words(q_len), dtype=torch.uint16)
    if point["block_sparse"]:
        heads = point["num_kv_heads"]
        tables = {name: given[name].expand(heads, *given[name].shape) for name in ("block_tables", "seq_lens")}
        given |= {name: each.contiguous() for name, each in tables.items()} | {"enable_block_sparse_attention": True}
    return DecodeCall(**given)


def context(point: Point) -> ContextCall:
    batch, lengths = point["batch_size"], min(point["q_len"], point["max_kv_len"])
    return ContextCall(
        **_paged(point),
        max_q_len=point["q_len"],
        max_kv_len=point["max_kv_len"],
        batch_size=batch,
        cum_seq_lens_q=offsets_of(batch, point["q_len"]),
        cum_seq_lens_kv=offsets_of(batch, lengths),
        causal=point["causal"],
    )


def _paged(point: Point) -> dict[str, Any]:
    q, kv, out = (DTYPES[name] for name in point["dtypes"].split("/"))
    heads, batch, page_size = point["group"] * point["num_kv_heads"], point["batch_size"], point["page_size"]
    rows, head_dim = batch * point["q_len"], point["head_dim"]
    columns = max(1, -(-point["q_len"] // page_size))
    shared = point["tables"] == "shared"
    given = {
        "query": query_of(point["query"], (rows, heads, head_dim), q),
        "kv_cache": _cache(point, head_dim // 2 if kv == torch.uint8 else head_dim, kv),
        "kv_layout": "NHD" if "NHD" in point["cache"] else "HND",
        "workspace_buffer": None,
        "block_tables": torch.zeros((batch, columns) if shared else (batch, 2, columns), dtype=torch.int32),
        "uses_shared_paged_kv_idx": shared,
        "seq_lens": torch.full((batch,), min(point["q_len"], point["max_kv_len"]), dtype=torch.int32),
        "window_left": point["window_left"],
        "out_dtype": out,
        "sinks": torch.zeros(heads) if point["sinks"] else None,
        **results_of(point, (rows, heads, head_dim), out),
        **scales_of(point["scales"]),
    }
    if kv == torch.uint8:
        given["kv_cache_sf"] = _factors(point, head_dim // NVFP4_BLOCK)
    return given


def mla_decode(point: Point) -> MLADecodeCall:
    q, kv, out = (DTYPES[name] for name in point["dtypes"].split("/"))
    rank, rope = point["dims"]
    batch, q_len, page_size, width = point["batch_size"], point["q_len"], point["page_size"], rank + rope
    rows = batch * q_len
    ragged = point["rows"] == "ragged"
    query = query_of(point["query"], (rows, point["heads"], width), q)
    if not ragged:
        query = query.unflatten(0, (batch, q_len))
    token = width + amount(point["gap"], "# elements a token")
    page = page_size * token + amount(point["gap"], "# bytes a page") // kv.itemsize
    cache = strided((4, 1, page_size, width), (page, page, token, 1), kv, amount(point["kv_start"], "K # bytes on"))
    results = results_of(point, (rows, point["heads"], rank), out)
    if "out" in results and not ragged:
        results["out"] = results["out"].unflatten(0, (batch, q_len))
    elif point["dtypes"].split("/")[2] != "bf16":
        results["out"] = torch.empty(*query.shape[:-1], rank, dtype=out)
    if results["lse"] is not None:
        results["return_lse"] = True
    if results["return_lse"]:
        results["return_lse_base"] = "base2"
    top_k = point["top_k"]
    tables = (*query.shape[:-2], top_k) if top_k else (batch, max(1, -(-q_len // page_size)))
    return MLADecodeCall(
        query=query,
        kv_cache=cache if point["cache"] == "4-D" else cache.squeeze(1),
        workspace_buffer=None,
        qk_nope_head_dim=128,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        block_tables=torch.zeros(tables, dtype=torch.int32),
        seq_lens=torch.full((batch,), min(q_len, point["max_kv_len"]), dtype=torch.int32),
        max_seq_len=point["max_kv_len"],
        sparse_mla_top_k=top_k,
        sparse_mla_top_k_lens=torch.ones(rows, dtype=torch.int32) if point["lens"] else None,
        sinks=torch.zeros(point["heads"]) if point["sinks"] else None,
        cum_seq_lens_q=offsets_of(batch, q_len) if ragged else None,
        max_q_len=q_len if ragged else None,
        backend="trtllm-gen",
        **results,
        **scales_of(point["scales"]),
    )


def offsets_of(batch: int, width: int) -> torch.Tensor:
    return torch.arange(0, batch + 1, dtype=torch.int32) * width


def scales_of(form: str) -> dict[str, Any]:
    if form == "numbers":
        return {"bmm1_scale": 0.1, "bmm2_scale": 0.5}
    tensors = {name: torch.full((1,), 0.1) for name in ("bmm1_scale", "bmm2_scale")}
    return tensors | ({"bmm1_scale_log2": torch.full((1,), 0.1)} if form == "log2" else {})


def results_of(point: Point, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    rows, heads, _ = shape
    given = {"given": (heads, 1), "strided": (heads + 3, 1)}.get(point["lse"])
    results: dict[str, Any] = {
        "lse": None if given is None else strided((rows, heads), given, torch.float32),
        "return_lse": point["lse"] == "returned",
    }
    if point["out"] != "none":
        strides = (shape[1] * shape[2], shape[2], 1)
        results["out"] = strided(shape, strides, dtype, amount(point["out"], "# bytes on"))
    return results


def query_of(form: str, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised query [num_rows, num_qo_heads, head_dim]. `form`: its layout, such as "rows 4 elements apart"."""
    _, heads, width = shape
    if form == "expanded":
        return torch.empty(1, heads, width, dtype=dtype).expand(shape)
    head = width + amount(form, "heads # elements apart")
    row = heads * head + (2 * width if form == "fused" else amount(form, "rows # elements apart"))
    return strided(shape, (row, head, 1), dtype, amount(form, "# bytes on"))


def _cache(point: Point, width: int, dtype: torch.dtype) -> Any:
    heads, page_size = point["num_kv_heads"], point["page_size"]
    token = width + amount(point["gap"], "# elements a token")
    starts = {name: amount(point["kv_start"], f"{name} # bytes on") for name in ("K", "V")}
    of_nhd = (heads * token, token) if "NHD" in point["cache"] else (token, page_size * token)
    shape, inner = _in_layout(point, width, *of_nhd)
    page = heads * page_size * token + amount(point["gap"], "# bytes a page") // dtype.itemsize
    if point["cache"] == "K is V":
        return strided((4, 1, *shape), (page, page, *inner), dtype, starts["K"])
    if "stacked" in point["cache"]:
        return strided((4, 2, *shape), (2 * page, page, *inner), dtype, starts["K"])
    v_page = page + (64 if point["v_strides"] == "others" else 0)
    return tuple(
        strided((4, *shape), (step, *inner), dtype, starts[name]) for name, step in (("K", page), ("V", v_page))
    )


def _factors(point: Point, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    heads, page_size, form = point["num_kv_heads"], point["page_size"], point["factors"]
    page = heads * page_size * width
    of_nhd = (heads * width, width) if form == "NHD" else (width, page_size * width)
    shape, inner = _in_layout(point, width, *of_nhd)
    k_gap = amount(form, "# bytes a page")
    v_gap = k_gap or amount(form, "V # bytes a page")
    k = strided((4, *shape), (page + k_gap, *inner), E4M3)
    return k, strided((4, *shape), (page + v_gap, *inner), E4M3, amount(form, "V # bytes on"))


def _in_layout(
    point: Point, width: int, token_stride: int, head_stride: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, strides) of a page in the layout that `point` names (HND or NHD). `width`: size of the last dimension."""
    sizes, strides = (point["page_size"], point["num_kv_heads"]), (token_stride, head_stride)
    step = 1 if "NHD" in point["cache"] else -1
    return (*sizes[::step], width), (*strides[::step], 1)


def amount(form: str, pattern: str) -> int:
    """Return the number that "#" of `pattern` matches in `form`, or 0: 16 for form "V 16 bytes on", pattern "V # bytes on"."""
    found = re.fullmatch(pattern.replace("#", r"(\d+)"), form)
    return int(found[1]) if found else 0


def strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, start_bytes: int = 0) -> torch.Tensor:
    """Return an uninitialised tensor with these strides. It begins `start_bytes` after a multiple of 64 bytes."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = torch.empty(math.ceil(((last + 1) * dtype.itemsize + start_bytes) / 64) * 64, dtype=torch.uint8)
    start_bytes -= start_bytes % dtype.itemsize
    return memory.view(dtype).as_strided(tuple(shape), tuple(strides), start_bytes // dtype.itemsize)
