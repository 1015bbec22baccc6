"""Define the arguments of DeepSeek-V4's call that the sweep (`lab.dry_run.sweep`) varies, make the calls, and find pools that a
launch misreads. An axis is an argument, and a point has one value for each axis.

The address of `sparse_indices` is not varied. The lab refuses an address that is not a multiple of 16 bytes, and the launcher
accepts any address.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lab.calls import DSV4DecodeCall
from lab.calls.dsv4_decode import TwoPools
from lab.calls.selection import WINDOW_COLUMNS
from lab.checks.parameters.covering import Model, Point
from lab.dry_run.launches import TensorMap
from lab.dry_run.sweep_calls import DTYPES, SOFTMAX_AXES, amount, offsets_of, query_of, scales_of, strided

AXES: dict[str, Sequence[Any]] = {
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
    **{name: SOFTMAX_AXES[name] for name in ("sinks", "out")},
    "scales": ("numbers", "tensors"),
}
DSV4_DECODE = Model(AXES, (), (("dtypes", "heads", "head_dim"), ("heads", "columns", "q_len")))
BASES: tuple[Point, ...] = ({}, {"dtypes": "e4m3/bf16", "heads": 16, "columns": 640}, {"rows": "ragged", "q_len": 4})


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


def misread_pools(maps: dict[str, TensorMap], problem: TwoPools) -> str | None:
    """Return a sentence about the first pool whose TMA descriptor has a wrong address or token stride, else None."""
    for name, pool in (("tmaKSlidingWindowKvPool_", problem.window_cache), ("tmaK_", problem.k_cache)):
        row_bytes = pool.shape[3] * pool.element_size()
        if (maps[name].address, maps[name].strides_bytes) != (pool.data_ptr(), (row_bytes,)):
            return f"launched with other strides of {name}"
    return None
