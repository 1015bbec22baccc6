"""Batches whose latent entries were written token by token, and attention over the histories that never saw a page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import lab.references
from lab.metadata import DraftAttention, ForwardBatch, ForwardMode, PagedLatentCache
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.mla.backend import MLALayer, TRTLLMMLABackend
from lab.workloads.requests import admit, new_pool
from tests.cases import expected, of_entries

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
        lens = (max_context_len,) * 6
        self.pool = new_pool(lens, page_size=page_size, max_context_len=max_context_len, spare_pages=2, seed=seed)
        self.cache: PagedLatentCache = self.pool.new_latent_cache(RANK + ROPE, torch.float64)
        self.cache.storage.fill_(1e30)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def release(self, rows: Sequence[int]) -> None:
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
    ) -> tuple[Served, tuple[int, ...]]:
        """Return a batch over new requests of these lengths, the last `news` tokens of each being this pass's; and their rows.

        In verification seq_lens leaves out the new tokens, in draft step s the last s + 1.
        """
        step = mode.draft_step if isinstance(mode, GraphMode) else None
        forward_mode = mode.forward_mode if isinstance(mode, GraphMode) else mode
        most = mode.num_tokens_per_req if isinstance(mode, GraphMode) else None
        uncounted = 0 if step is None else step + 1
        prefixes = [total - (uncounted or new) for total, new in zip(totals, news, strict=True)]
        requests = admit(self.pool, prefixes, news, step, most)
        histories = [self.draw(total, RANK + ROPE) for total in totals]
        requests.write(self.cache, [(history,) for history in histories])
        batch = requests.batch(forward_mode, num_padding_rows)
        batch = replace(batch, seq_lens_cpu=batch.seq_lens.tolist() if host_lengths else None)
        query = self.draw(batch.num_tokens, HEADS, RANK + ROPE)
        hidden = uncounted if attention is MLA else 0
        seen = [history[: len(history) - hidden] for history in histories]
        return Served(batch, query, latent_attention(query[: sum(news)].split(news), seen)), requests.rows


def latent_attention(queries: Sequence[Tensor], entries: Sequence[Tensor]) -> Tensor:
    """Return [rows of all requests, HEADS, RANK] of each request's rows [rows, HEADS, RANK + ROPE] over its entries."""
    return expected(of_entries([*queries], [*entries], RANK), bmm1_scale=LAYER.softmax_scale)[0]
