"""The calls of the sweep as points: a value for each axis. An axis is an argument of a trtllm-gen call, with some right and
some wrong values.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lab.calls.problem import NVFP4_BLOCK, AttentionCall
from lab.checks.parameters.covering import Constraint, Model, Point

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
    "gap": (
        "none",
        "8 bytes a page",
        "16 bytes a page",
        "32 bytes a page",
        "4 elements a token",
        "16 elements a token",
    ),
    "v_strides": ("K's", "others"),
    "kv_start": ("aligned", "K 8 bytes on", "V 8 bytes on", "K 16 bytes on", "V 16 bytes on"),
    "factors": ("HND", "NHD", "8 bytes a page", "16 bytes a page", "V 16 bytes a page", "V 8 bytes on"),
    "query": (
        "packed",
        "fused",
        "heads 4 elements apart",
        "rows 4 elements apart",
        "rows 16 elements apart",
        "expanded",
        "8 bytes on",
    ),
    **SOFTMAX_AXES,
}
DECODE_AXES = PAGED_AXES | {"rows": ("uniform", "ragged"), "mask": (False, True)}
CONTEXT_AXES = PAGED_AXES | {"rows": ("ragged",), "causal": (True, False), "scales": ("numbers", "tensors")}
MLA_AXES: dict[str, Sequence[Any]] = {
    "dtypes": (
        "bf16/bf16/bf16",
        "e4m3/e4m3/bf16",
        "fp16/fp16/bf16",
        "bf16/e4m3/bf16",
        "bf16/bf16/fp16",
        "e4m3/e4m3/e4m3",
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
}
RAGGED_AXES: dict[str, Sequence[Any]] = {
    "dtypes": (
        "bf16/bf16/bf16",
        *(f"{q}/{q}/{out}" for q in OUTS for out in ("fp16", "bf16")),
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
    **SOFTMAX_AXES,
    "scales": ("numbers", "tensors"),
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
MODELS: Mapping[AttentionCall, Model] = {
    AttentionCall.DECODE: Model(
        DECODE_AXES,
        (
            *PAGED_RULES,
            Constraint(lambda mask, rows: not mask or rows == "uniform", "a mask has q_len rows"),
        ),
        (("dtypes", "head_dim", "page_size"), ("group", "num_kv_heads", "q_len"), ("dtypes", "group", "num_kv_heads")),
    ),
    AttentionCall.CONTEXT: Model(
        CONTEXT_AXES,
        (*PAGED_RULES, WINDOW_IS_CAUSAL),
        (("dtypes", "head_dim", "page_size"), ("dtypes", "head_dim", "window_left")),
    ),
    AttentionCall.MLA_DECODE: Model(
        MLA_AXES,
        (ROW_IS_A_KEY,),
        (("dtypes", "dims", "heads"), ("heads", "dims", "max_kv_len"), ("heads", "q_len", "page_size")),
    ),
    AttentionCall.RAGGED_CONTEXT: Model(
        RAGGED_AXES,
        (
            WINDOW_IS_CAUSAL,
            Constraint(lambda dims, gap: dims != (256, 256) or gap != "fused", "as SGLang's are"),
        ),
        (("dtypes", "dims", "causal"), ("dtypes", "dims", "window_left")),
    ),
}


# Calls that trtllm-gen supports. Random points differ from one of them.
PAGED_BASES: tuple[Point, ...] = (
    {},
    {"dtypes": "e4m3/nvfp4/e4m3"},
    {"dtypes": "e4m3/nvfp4/e4m3", "head_dim": 64, "page_size": 16},
    {"dtypes": "e4m3/e4m3/fp16", "head_dim": 256},
    {"dtypes": "fp16/fp16/fp16", "head_dim": 64, "page_size": 128},
    {"head_dim": 512, "page_size": 32},
)
BASES: Mapping[AttentionCall, tuple[Point, ...]] = {
    AttentionCall.DECODE: (*PAGED_BASES, {"dtypes": "fp16/e4m3/fp16"}, {"q_len": 4, "group": 16}),
    AttentionCall.CONTEXT: (*PAGED_BASES, {"head_dim": 80, "q_len": 64}, {"q_len": 150, "causal": False}),
    AttentionCall.MLA_DECODE: (
        {},
        {"dims": (256, 64), "heads": 32},
        {"dtypes": "e4m3/e4m3/bf16", "heads": 16, "q_len": 4},
    ),
    AttentionCall.RAGGED_CONTEXT: ({}, {"dtypes": "e4m3/e4m3/bf16"}, {"dims": (128, 128), "causal": False}),
}


def points(call: AttentionCall, drawn: int, seed: int = 0) -> Iterator[Point]:
    """Yield distinct points of a call: each value of each axis alone, with all other arguments at their default; all
    combinations of the axes in `Model.triples`; then random points.

    Args:
        call: one of the four calls.
        drawn: number of random points. Each differs from one of `BASES` on 1 to 5 axes.
        seed: seed of the random points.
    """
    model, rng = MODELS[call], random.Random(f"{call.name} {seed}")
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
    """Return a random point that differs from one of `BASES` on 1 to 5 axes; None if the model's constraints forbid it."""
    model = MODELS[call]
    names = rng.sample(list(model.axes), rng.randint(1, 5))
    return model.completed(rng.choice(BASES[call]) | {name: rng.choice(model.axes[name]) for name in names})
