"""Small MLA problems by their truth, the call that poses them, and a second formula that solves them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.cases import assert_same, running_sum, write_pages

RANK, ROPE = 8, 4
Arguments = dict[str, Any]


@dataclass(frozen=True)
class LatentBatch:
    """queries[r]: [q_len, num_qo_heads, rank + rope]; entries[r]: [kv_len, rank + rope], the latent vector first."""

    queries: list[Tensor]
    entries: list[Tensor]
    rank: int = RANK

    @property
    def q_lens(self) -> list[int]:
        return [len(rows) for rows in self.queries]


def latent_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: int = 4,
    rank: int = RANK,
    rope: int = ROPE,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LatentBatch:
    generator = torch.Generator().manual_seed(seed)
    return LatentBatch(
        [torch.randn(n, heads, rank + rope, generator=generator).to(dtype) for n in q_lens],
        [torch.randn(n, rank + rope, generator=generator).to(kv_dtype or dtype) for n in kv_lens],
        rank,
    )


def mla_arguments(
    batch: LatentBatch,
    page_size: int = 16,
    *,
    ragged: bool = False,
    poison: float = 0.0,
    foreign_id: int | None = None,
    seed: int = 0,
    **changes: Any,
) -> Arguments:
    """The call that poses a batch, from a shuffled pool, with an output in float64 and the LSE."""
    histories = [entries.unsqueeze(1) for entries in batch.entries]
    cache, table = write_pages(histories, page_size, seed=seed, poison=poison, foreign_id=foreign_id)
    query = torch.cat(batch.queries) if ragged else torch.stack(batch.queries)
    arguments: Arguments = {
        "query": query,
        "kv_cache": cache,
        "workspace_buffer": None,
        "qk_nope_head_dim": 6,
        "kv_lora_rank": batch.rank,
        "qk_rope_head_dim": query.shape[-1] - batch.rank,
        "block_tables": table,
        "seq_lens": torch.tensor([len(entries) for entries in batch.entries], dtype=torch.int32),
        "max_seq_len": max(len(entries) for entries in batch.entries),
        "out": torch.full((*query.shape[:-1], batch.rank), math.nan, dtype=torch.float64),
        "return_lse": True,
        "return_lse_base": "base2",
    }
    if ragged:
        arguments |= {"cum_seq_lens_q": running_sum(batch.q_lens), "max_q_len": max(batch.q_lens)}
    return arguments | changes


def dense(
    batch: LatentBatch, *, bmm1_scale: float = 1.0, bmm2_scale: float = 1.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [num_rows, heads, rank] and base-2 LSE [num_rows, heads], float64: one request's full matrix at a time."""
    outs, lses = [], []
    for rows, entries in zip(batch.queries, batch.entries, strict=True):
        q, k = rows.double(), entries.double()
        logits = torch.einsum("ihd,jd->ihj", q, k) * bmm1_scale
        positions = len(k) - len(q) + torch.arange(len(q))
        later = torch.arange(len(k)) > positions.unsqueeze(1)
        logits = logits.masked_fill(later.unsqueeze(1), -math.inf)
        sink = torch.full((q.shape[1],), -math.inf) if sinks is None else sinks
        logits = torch.cat((logits, sink.double().view(1, -1, 1).expand(len(q), -1, 1)), dim=-1)
        weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)[..., :-1]
        outs.append(torch.einsum("ihj,jd->ihd", weights, k[:, : batch.rank]) * bmm2_scale)
        lses.append(torch.logsumexp(logits, dim=-1) / math.log(2.0))
    return torch.cat(outs), torch.cat(lses)


def assert_right(result: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> None:
    """The call's result, whose output may have the requests as a dimension, against `dense`'s rows."""
    out, lse = result
    assert_same((out.reshape(truth[0].shape), lse), truth)
