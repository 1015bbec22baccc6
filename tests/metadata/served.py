"""Batches whose latent entries were written token by token, and attention over the histories that never saw a page."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import lab.references
from lab.metadata import DraftAttention, ForwardBatch, ForwardMode, KVPool, PagedLatentCache
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.mla.backend import MLALayer, TRTLLMMLABackend
from lab.workloads.requests import Requests

MLA, MLA_WITH_OFFSET = DraftAttention.MLA, DraftAttention.MLA_WITH_OFFSET
PAGE_SIZES = [32, 64]
HEADS, RANK, ROPE = 3, 8, 4
REFERENCE = TRTLLMMLABackend(lab.references)
LAYER = MLALayer(0.4, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=6, v_head_dim=5)


@dataclass(frozen=True, eq=False)
class Served:
    """A batch whose cache was written token by token, and the attention over its histories."""

    batch: ForwardBatch
    query: Tensor  #: float64 [num_tokens, HEADS, RANK + ROPE]
    expected: Tensor  #: float64 [rows of the requests, HEADS, RANK]

    def assert_right(self, out: Tensor) -> None:
        torch.testing.assert_close(out[: len(self.expected)], self.expected, rtol=1e-12, atol=1e-12)


class Engine:
    """A pool with shuffled pages of which every token's entry is known, and what was never written is huge."""

    def __init__(self, page_size: int = 32, *, max_context_len: int = 150, seed: int = 0) -> None:
        num_requests = 6
        pages = num_requests * -(-max_context_len // page_size) + 3
        self.pool = KVPool(
            num_requests=num_requests,
            max_context_len=max_context_len,
            page_size=page_size,
            num_pages=pages,
            seed=seed,
        )
        self.cache: PagedLatentCache = self.pool.new_latent_cache(RANK + ROPE, torch.float64)
        self.cache.storage.fill_(1e30)
        self.generator = torch.Generator().manual_seed(seed)
        self.history: dict[int, Tensor] = {}

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def admit(self, lengths: list[int]) -> list[int]:
        """Requests that grow in turns, so that their pages interleave."""
        rows = [self.pool.add_request(0) for _ in lengths]
        self.history |= {row: self.draw(length, RANK + ROPE) for row, length in zip(rows, lengths, strict=True)}
        for start in range(0, max(lengths), 7):
            for row, length in zip(rows, lengths, strict=True):
                tokens = slice(min(start, length), min(start + 7, length))
                slots = self.pool.extend_request(row, tokens.stop - tokens.start)
                self.cache.write(slots, self.history[row][tokens])
        return rows

    def release(self, rows: list[int]) -> None:
        for row in rows:
            self.pool.free_request(row)

    def serve(
        self,
        mode: GraphMode | ForwardMode,
        totals: list[int],
        news: list[int],
        *,
        attention: DraftAttention = MLA,
        host_lengths: bool = False,
        num_padding_rows: int = 0,
    ) -> tuple[Served, list[int]]:
        """Return a batch over new requests of these lengths, the last `news` tokens of each being this pass's; and their rows.

        In verification seq_lens leaves out the new tokens, in draft step s the last s + 1.
        """
        step = mode.draft_step if isinstance(mode, GraphMode) else None
        forward_mode = mode.forward_mode if isinstance(mode, GraphMode) else mode
        most = mode.num_tokens_per_req if isinstance(mode, GraphMode) else None
        rows, uncounted = self.admit(totals), 0 if step is None else step + 1
        prefixes = tuple(total - (uncounted or new) for total, new in zip(totals, news, strict=True))
        batch = Requests(self.pool, tuple(rows), prefixes, tuple(news), step, most).batch(
            forward_mode, num_padding_rows
        )
        batch = replace(batch, seq_lens_cpu=batch.seq_lens.tolist() if host_lengths else None)
        query = self.draw(batch.num_tokens, HEADS, RANK + ROPE)
        expected, first = [], 0
        for row, total, new in zip(rows, totals, news, strict=True):
            seen = total - uncounted if step is not None and attention is MLA else total
            expected.append(latent_attention(query[first : first + new], self.history[row][:seen]))
            first += new
        return Served(batch, query, torch.cat(expected)), rows


def latent_attention(query: Tensor, entries: Tensor) -> Tensor:
    """Return [rows, HEADS, RANK] of rows [rows, HEADS, RANK + ROPE] over one request's entries."""
    keys = entries.unsqueeze(1).expand(-1, HEADS, -1)
    return causal_attention(query, keys, keys[..., :RANK], LAYER.softmax_scale)


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend one row at a time over [tokens, heads, dim]; the last row sees all keys."""
    out = []
    for j, row in enumerate(query):
        seen = len(keys) - len(query) + j + 1
        weights = torch.softmax(scale * torch.einsum("hd,khd->hk", row, keys[:seen]), dim=-1)
        out.append(torch.einsum("hk,khd->hd", weights, values[:seen]))
    return torch.stack(out)
