"""Define the arguments of the sweep's decode, context and MLA calls. A *point* has a value for each *axis*; an axis is an
argument of a trtllm-gen call, with values that the kernels support and values that they do not.
"""

from collections.abc import Sequence
from typing import Any

from lab.calls.problem import NVFP4_BLOCK
from lab.checks.parameters.covering import Constraint, Model

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
DECODE_AXES = PAGED_AXES | {"rows": ("uniform", "ragged"), "mask": (False, True), "block_sparse": (False, True)}
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
    DECODE_AXES,
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
    CONTEXT_AXES,
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
