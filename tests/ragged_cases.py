"""Small problems over ragged K and V by their truth, the call that poses them, a second formula, and chunks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.cases import Batch, running_sum

Arguments = dict[str, Any]


def ragged_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (3, 3),
    dims: tuple[int, int] = (12, 8),
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Batch:
    """Normally distributed; `heads` are query and K/V heads, `dims` those of keys and of values."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, num_heads: int, head_dim: int) -> Tensor:
        return torch.randn(length, num_heads, head_dim, generator=generator).to(dtype)

    return Batch(
        [draw(n, heads[0], dims[0]) for n in q_lens],
        [draw(n, heads[1], dims[0]) for n in kv_lens],
        [draw(n, heads[1], dims[1]) for n in kv_lens],
    )


def ragged_arguments(batch: Batch, **changes: Any) -> Arguments:
    """The call that poses a batch, causal, with an output in float64 and the LSE."""
    query, key, value = (torch.cat(side) for side in (batch.queries, batch.keys, batch.values))
    out = torch.full((*query.shape[:2], value.shape[2]), math.nan, dtype=torch.float64)
    arguments: Arguments = {
        "query": query,
        "key": key,
        "value": value,
        "workspace_buffer": None,
        "seq_lens": torch.tensor(batch.kv_lens, dtype=torch.int32),
        "max_q_len": max(batch.q_lens),
        "max_kv_len": max(batch.kv_lens),
        "bmm1_scale": 0.25,
        "bmm2_scale": 1.0,
        "o_sf_scale": 1.0,
        "batch_size": len(batch.queries),
        "window_left": -1,
        "cum_seq_lens_q": running_sum(batch.q_lens),
        "cum_seq_lens_kv": running_sum(batch.kv_lens),
        "enable_pdl": None,
        "is_causal": True,
        "return_lse": True,
        "out": out,
    }
    return arguments | changes


def mirrors(batch: Batch, dtype: torch.dtype = torch.int32) -> Arguments:
    return {
        "q_seq_lens_cpu": torch.tensor(batch.q_lens, dtype=dtype),
        "kv_seq_lens_cpu": torch.tensor(batch.kv_lens, dtype=dtype),
    }


def dense(
    batch: Batch,
    *,
    causal: bool = True,
    window_left: int = -1,
    bmm1_scale: float = 0.25,
    bmm2_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and base-2 LSE, float64: one request's full matrix at a time, masked by torch's own lower triangle."""
    outs, lses = [], []
    for q, k, v in zip(batch.queries, batch.keys, batch.values, strict=True):
        k, v = (side.double().repeat_interleave(q.shape[1] // side.shape[1], dim=1) for side in (k, v))
        logits = torch.einsum("ihd,jhd->hij", q.double(), k) * bmm1_scale
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        if causal:
            seen = seen.tril(len(k) - len(q))
        if window_left >= 0:
            seen = seen.triu(len(k) - len(q) - window_left)
        logits = logits.masked_fill(~seen, -math.inf)
        sink = torch.full((q.shape[1],), -math.inf) if sinks is None else sinks
        logits = torch.cat((logits, sink.double().view(-1, 1, 1).expand(-1, len(q), 1)), dim=-1)
        weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)[..., :-1]
        outs.append(torch.einsum("hij,jhd->ihd", weights, v) * bmm2_scale)
        lses.append(torch.logsumexp(logits, dim=-1).T / math.log(2.0))
    return torch.cat(outs), torch.cat(lses)


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What an engine makes of results over disjoint keys: a mean weighted by 2 ** LSE."""
    lses = torch.stack([lse for _, lse in parts]).double()
    total = torch.logsumexp(lses * math.log(2.0), dim=0) / math.log(2.0)
    weights = torch.exp2(lses - total).nan_to_num(0.0)
    return torch.stack([out for out, _ in parts]).mul(weights.unsqueeze(-1)).sum(0), total


def chunk(batch: Batch, starts: Sequence[int], ends: Sequence[int]) -> Batch:
    keys, values = (
        [rows[start:end] for rows, start, end in zip(side, starts, ends, strict=True)]
        for side in (batch.keys, batch.values)
    )
    return Batch(batch.queries, keys, values)
