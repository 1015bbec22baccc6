"""A slow decode kernel in Triton that skips its work if it considers it done."""

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # kernels that need it are for a GPU, where torch brings it
    triton = None

if triton is not None:

    @triton.jit
    def _kernel(
        query, keys, values, tables, lens, out, kept, scale, width, page_stride, head_stride, token_stride,
        HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, KEEPS: tl.constexpr,
    ):  # fmt: skip
        request, head = tl.program_id(0), tl.program_id(1)
        dims = tl.arange(0, DIM)
        here = (request * HEADS + head) * DIM + dims
        if KEEPS:
            first = tl.load(tables + request * width)
            probe = tl.load(keys + first * page_stride + head // GROUP * head_stride)
            known = tl.load(kept + HEADS * tl.num_programs(0) * DIM + request * HEADS + head)
            if probe == known:
                tl.store(out + here, tl.load(kept + here))
                return
        else:
            written = tl.load(out + here)
            if tl.sum((written == written).to(tl.int32)) == DIM:
                return
        row = tl.load(query + here).to(tl.float32) * scale
        most, total, sums = -1e30, 0.0, tl.zeros((DIM,), tl.float32)
        for start in range(0, tl.load(lens + request), PAGE):
            page = tl.load(tables + request * width + start // PAGE).to(tl.int64)
            tokens = tl.arange(0, PAGE)
            at = page * page_stride + head // GROUP * head_stride + tokens[:, None] * token_stride + dims[None, :]
            seen = start + tokens < tl.load(lens + request)
            logits = tl.sum(tl.load(keys + at, mask=seen[:, None], other=0.0).to(tl.float32) * row[None, :], 1)
            logits = tl.where(seen, logits, -1e30)
            higher = tl.maximum(most, tl.max(logits, 0))
            weights = tl.exp(logits - higher)
            decay = tl.exp(most - higher)
            read = tl.load(values + at, mask=seen[:, None], other=0.0).to(tl.float32)
            sums = sums * decay + tl.sum(weights[:, None] * read, 0)
            total, most = total * decay + tl.sum(weights, 0), higher
        result = (sums / total).to(out.dtype.element_ty)
        tl.store(out + here, result)
        if KEEPS:
            tl.store(kept + here, result)
            tl.store(kept + HEADS * tl.num_programs(0) * DIM + request * HEADS + head, probe)


def decode_unless_written(kept: torch.Tensor | None = None, **arguments: Any) -> torch.Tensor:
    """Run a decode of one row per request, unless the output is already written, or `kept` has a result for the
    same first key.
    """
    query, (keys, values), out = arguments["query"], arguments["kv_cache"], arguments["out"]
    rows, heads, dim = query.shape
    _kernel[(rows, heads)](
        query, keys, values, arguments["block_tables"], arguments["seq_lens"], out, out if kept is None else kept,
        arguments["bmm1_scale"], arguments["block_tables"].shape[1], keys.stride(0), keys.stride(1), keys.stride(2),
        HEADS=heads, GROUP=heads // keys.shape[1], DIM=dim, PAGE=keys.shape[2], KEEPS=kept is not None,
    )  # fmt: skip
    return out
