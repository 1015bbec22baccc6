"""Choose the calls on which the lab's rules are compared with FlashInfer's launcher (the sweep), and make ragged context calls
and DeepSeek-V4's. A *point* describes one call: it has a value for each *axis*, which is an argument.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lab.calls import DSV4DecodeCall, RaggedContextCall
from lab.calls.block_scales import SAGE_DTYPES
from lab.calls.problem import E4M3, AttentionCall
from lab.calls.selection import WINDOW_COLUMNS
from lab.checks.parameters.covering import Constraint, Model, Point
from lab.dry_run import sweep_calls
from lab.dry_run.sweep_calls import DTYPES, amount, offsets_of, query_of, scales_of, strided

RAGGED_AXES: dict[str, Sequence[Any]] = {
    "dtypes": (
        "bf16/bf16/bf16",
        *(f"{q}/{q}/{out}" for q in (*sweep_calls.OUTS, "int8") for out in ("fp16", "bf16")),
        "fp32/fp32/fp32",
        "bf16/bf16/fp32",
    ),
    "dims": ((192, 128), (128, 128), (256, 256), (64, 64), (192, 192)),
    "num_kv_heads": (8, 1, 16),
    "group": (1, 2, 3, 4, 8, 64),
    "q_len": (64, 1, 3, 17, 300),
    "kv_len": (300, 1, 64, 1000),
    "batch_size": (2, 1, 3, 17),
    "causal": (True, False),
    "window_left": (-1, 0, 20, 126, 299, 999),
    "gap": ("none", "fused", "4 elements a head", "16 elements a head", "4 elements a token"),
    "kv_start": ("aligned", "K 8 bytes on", "V 8 bytes on", "K 16 bytes on"),
    "query": ("packed", "heads 16 elements apart", "8 bytes on"),
    "lengths": ("on the GPU", "mirrored"),
    **sweep_calls.SOFTMAX_AXES,
    "scales": ("numbers", "tensors"),
    "sage": ((0, 0), (1, 16), (1, 4), (1, 1), (4, 16)),  # (rows, keys) of a block with a scale; (0, 0): no scales
}
RAGGED_CONTEXT = Model(
    RAGGED_AXES,
    (
        sweep_calls.WINDOW_IS_CAUSAL,
        Constraint(
            lambda dtypes, sage: sage == (0, 0) or dtypes.startswith(("int8", "e4m3")), "scales of quantised blocks"
        ),
        Constraint(lambda dtypes, sage: sage != (0, 0) or not dtypes.startswith("int8"), "int8 has scales of blocks"),
        Constraint(lambda dims, gap: dims != (256, 256) or gap != "fused", "as SGLang's are"),
    ),
    (("dtypes", "dims", "causal"), ("dtypes", "dims", "window_left"), ("dtypes", "sage", "causal")),
)


def ragged_context(point: Point) -> RaggedContextCall:
    q, _, out = (DTYPES[name] for name in point["dtypes"].split("/"))
    (width, v_width), kv_heads, batch = point["dims"], point["num_kv_heads"], point["batch_size"]
    heads, rows, tokens = kv_heads * point["group"], batch * point["q_len"], batch * point["kv_len"]
    gap = 128 if point["gap"] == "fused" else amount(point["gap"], "# elements a head")
    spare = amount(point["gap"], "# elements a token")
    key, value = (
        strided((tokens, kv_heads, size), (kv_heads * (size + gap) + spare, size + gap, 1), dtype, start)
        for size, dtype, start in (
            (width, q, amount(point["kv_start"], "K # bytes on")),
            (v_width, E4M3 if q == torch.int8 else q, amount(point["kv_start"], "V # bytes on")),
        )
    )
    lengths = [torch.full((batch,), each, dtype=torch.int32) for each in (point["q_len"], point["kv_len"])]
    mirrored = point["lengths"] == "mirrored"
    results = sweep_calls.results_of(point, (rows, heads, v_width), out)
    if "out" not in results and out != (torch.bfloat16 if q in SAGE_DTYPES else q):
        results["out"] = torch.empty(rows, heads, v_width, dtype=out)
    if any(blocks := point["sage"]):
        counts = (-(-total // size) + batch - 1 for total, size in zip((rows, tokens), blocks, strict=True))
        q_sf, k_sf = (torch.ones(each, count) for each, count in zip((heads, kv_heads), counts, strict=True))
        results["sage_attn_sfs"] = (q_sf, k_sf, None, torch.ones(kv_heads, v_width))
        results["num_elts_per_sage_attn_blk"] = (*blocks, 0, 1)
    return RaggedContextCall(
        query=query_of(point["query"], (rows, heads, width), q),
        key=key,
        value=value,
        workspace_buffer=None,
        seq_lens=lengths[1],
        max_q_len=point["q_len"],
        max_kv_len=point["kv_len"],
        o_sf_scale=1.0,
        batch_size=batch,
        window_left=point["window_left"],
        cum_seq_lens_q=offsets_of(batch, point["q_len"]),
        cum_seq_lens_kv=offsets_of(batch, point["kv_len"]),
        enable_pdl=None,
        is_causal=point["causal"],
        attention_sinks=torch.zeros(heads) if point["sinks"] else None,
        q_seq_lens_cpu=lengths[0] if mirrored else None,
        kv_seq_lens_cpu=lengths[1] if mirrored else None,
        **results,
        **scales_of(point["scales"]),
    )


# The address of `sparse_indices` is not varied. The lab refuses an address that is not a multiple of 16 bytes, and the launcher
# accepts any address.
DSV4_AXES: dict[str, Sequence[Any]] = {
    # of query and pools, and of the output
    "dtypes": ("bf16/bf16", "e4m3/bf16", "fp16/bf16", "bf16/fp16", "e4m3/e4m3"),
    "head_dim": (512, 64, 576),
    "heads": (128, 1, 7, 8, 16, 24, 32, 64, 96, 256),
    "columns": (192, 128, 132, 640, 2176),
    "page_sizes": ((256, 64), (256, 2), (64, 64), (128, 1)),
    "q_len": (1, 2, 4, 9),
    "batch_size": (2, 1, 17, 40),
    "rows": ("uniform", "ragged"),
    "gap": ("none", "8 bytes a page", "1 tokens a page", "16 elements a token", "1 tokens a token"),
    "pool_start": ("aligned", "8 bytes on", "16 bytes on"),
    "indices": ("packed", "rows 4 columns apart"),
    "query": ("packed", "heads 4 elements apart", "heads 16 elements apart", "8 bytes on"),
    **{name: sweep_calls.SOFTMAX_AXES[name] for name in ("sinks", "out")},
    "scales": ("numbers", "tensors"),
}
DSV4_DECODE = Model(DSV4_AXES, (), (("dtypes", "heads", "head_dim"), ("heads", "columns", "q_len")))


def dsv4_decode(point: Point) -> DSV4DecodeCall:
    dtype, out = (DTYPES[name] for name in point["dtypes"].split("/"))
    batch, q_len, width, heads = (point[name] for name in ("batch_size", "q_len", "head_dim", "heads"))
    rows, is_ragged = batch * q_len, point["rows"] == "ragged"
    query = query_of(point["query"], (rows, heads, width), dtype)
    shape = query.shape if is_ragged else (batch, q_len, heads, width)
    strides = (heads * width, width, 1) if is_ragged else (q_len * heads * width, heads * width, width, 1)
    has_out = point["out"] != "none" or out != torch.bfloat16
    columns = point["columns"]
    row = columns + amount(point["indices"], "rows # columns apart")
    window, compressed = (_pool(point, page_size, dtype) for page_size in point["page_sizes"])
    return DSV4DecodeCall(
        query=query if is_ragged else query.unflatten(0, (batch, q_len)),
        swa_kv_cache=window,
        workspace_buffer=None,
        sparse_indices=strided((rows, columns), (row, 1), torch.int32).fill_(0),
        compressed_kv_cache=compressed,
        sparse_topk_lens=torch.full((rows,), WINDOW_COLUMNS, dtype=torch.int32),
        seq_lens=torch.full((batch,), q_len, dtype=torch.int32),
        out=strided(shape, strides, out, amount(point["out"], "# bytes on")) if has_out else None,
        sinks=torch.zeros(heads) if point["sinks"] else None,
        cum_seq_lens_q=offsets_of(batch, q_len) if is_ragged else None,
        max_q_len=q_len if is_ragged else None,
        backend="trtllm-gen",
        sparse_indices_are_storage_offsets=None if point["gap"] == "none" else False,
        **scales_of(point["scales"]),
    )


def _pool(point: Point, page_size: int, dtype: torch.dtype) -> torch.Tensor:
    width, gap = point["head_dim"], point["gap"]
    token = width + amount(gap, "# elements a token") + width * amount(gap, "# tokens a token")
    page = page_size * token + amount(gap, "# bytes a page") // dtype.itemsize + width * amount(gap, "# tokens a page")
    return strided((4, page_size, width), (page, token, 1), dtype, amount(point["pool_start"], "# bytes on"))


PAGED_BASES: tuple[Point, ...] = (
    {},
    {"dtypes": "e4m3/nvfp4/e4m3"},
    {"dtypes": "e4m3/nvfp4/e4m3", "head_dim": 64, "page_size": 16},
    {"dtypes": "e4m3/e4m3/fp16", "head_dim": 256},
    {"dtypes": "fp16/fp16/fp16", "head_dim": 64, "page_size": 128},
    {"head_dim": 512, "page_size": 32},
)


@dataclass(frozen=True)
class SweptCall:
    model: Model  #: the axes of the call, with constraints on their values
    bases: tuple[Point, ...]  #: points that trtllm-gen supports. A random point differs from one of them on some axes.
    make: Callable[[Point], Any]  #: returns the call that a point describes, as an object of its class in `lab.calls`


SWEPT: Mapping[AttentionCall, SweptCall] = {
    AttentionCall.DECODE: SweptCall(
        sweep_calls.DECODE, (*PAGED_BASES, {"dtypes": "fp16/e4m3/fp16"}, {"q_len": 4, "group": 16}), sweep_calls.decode
    ),
    AttentionCall.CONTEXT: SweptCall(
        sweep_calls.CONTEXT,
        (*PAGED_BASES, {"head_dim": 80, "q_len": 64}, {"q_len": 150, "causal": False}),
        sweep_calls.context,
    ),
    AttentionCall.MLA_DECODE: SweptCall(
        sweep_calls.MLA_DECODE,
        (
            {},
            {"dims": (256, 64), "heads": 32},
            {"dtypes": "e4m3/e4m3/bf16", "heads": 16, "q_len": 4},
            {"top_k": 2048},
            {"dims": (512, 0), "top_k": 64, "lens": True},
        ),
        sweep_calls.mla_decode,
    ),
    AttentionCall.RAGGED_CONTEXT: SweptCall(
        RAGGED_CONTEXT,
        ({}, {"dtypes": "e4m3/e4m3/bf16"}, {"dims": (128, 128), "causal": False}),
        ragged_context,
    ),
    AttentionCall.DSV4_DECODE: SweptCall(
        DSV4_DECODE,
        ({}, {"dtypes": "e4m3/bf16", "heads": 16, "columns": 640}, {"rows": "ragged", "q_len": 4}),
        dsv4_decode,
    ),
}


def points(call: AttentionCall, drawn: int, seed: int = 0) -> Iterator[Point]:
    """Yield calls (values of all arguments) without duplicates: first calls with at most one non-default argument; then, for
    each three arguments in `Model.triples`, calls with all combinations of their values; then up to `drawn` random calls.
    """
    model, rng = SWEPT[call].model, random.Random(f"{call.name} {seed}")
    grids = (
        model.completed(dict(zip(names, values, strict=True)))
        for names in model.triples
        for values in itertools.product(*(model.axes[name] for name in names))
    )
    found = set[str]()
    for point in itertools.chain(model.alone(), grids, (_drawn(call, rng) for _ in range(drawn))):
        if point is not None and repr(point) not in found:
            found.add(repr(point))
            yield point


def _drawn(call: AttentionCall, rng: random.Random) -> Point | None:
    model = SWEPT[call].model
    names = rng.sample(list(model.axes), rng.randint(1, 5))
    return model.completed(rng.choice(SWEPT[call].bases) | {name: rng.choice(model.axes[name]) for name in names})
