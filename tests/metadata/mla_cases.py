"""What the tests of MLA's metadata share: the truth in loops, and batches whose entries were written token by token."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.metadata import DraftAttention, ForwardBatch, ForwardMode, KVPool, PagedLatentCache, SpecInfo
from lab.metadata.engine.forward_mode import QueryRows, UncountedTokens
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.mla.calls import MLALayer
from lab.references.forward_metadata import key_length, live_pages, query_length
from tests.metadata.mha_cases import DRAFT_EXTENDS, Case

MLA, MLA_WITH_OFFSET = DraftAttention.MLA, DraftAttention.MLA_WITH_OFFSET
PAGE_SIZES = [32, 64]
HEADS, RANK, ROPE = 3, 8, 4
LAYER = MLALayer(0.4, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=6, v_head_dim=5)


def decode_cases(page_size: int) -> list[Case]:
    """Every mode on the decode kernel, at lengths that offsets and padding carry over a page boundary."""
    p = page_size
    lens = (p + 1, 2 * p, 3 * p - 1, 3 * p + 1)
    common: dict[str, Any] = {"page_size": p, "max_context_len": 5 * p - 3, "sliding_window": False}
    return [
        Case(ForwardMode.DECODE, lens, **common),
        Case(ForwardMode.IDLE, lens, **common),
        Case(ForwardMode.IDLE, (), **common),
        *[Case(ForwardMode.DECODE, lens, new=step + 1, **common) for step in range(3)],
        Case(ForwardMode.TARGET_VERIFY, lens, new=1, **common),
        Case(ForwardMode.TARGET_VERIFY, lens, new=4, **common),
        Case(ForwardMode.TARGET_VERIFY, (), new=4, **common),
        *[Case(ForwardMode.RAGGED_VERIFY, lens, new_lens=(3, 1, 4, 2), new=draft, **common) for draft in (4, 6)],
        Case(ForwardMode.RAGGED_VERIFY, lens, new_lens=(4, 4, 4, 4), new=4, num_padding_rows=2, **common),
        Case(ForwardMode.RAGGED_VERIFY, (), new=4, **common),
        *[Case(mode, lens, new_lens=(3, 1, 4, 2), **common) for mode in DRAFT_EXTENDS],
        *[Case(mode, lens, new_lens=(4, 4, 4, 4), num_padding_rows=2, **common) for mode in DRAFT_EXTENDS],
        *[Case(mode, (), **common) for mode in DRAFT_EXTENDS],
    ]


def own_keys(batch: ForwardBatch, attention: DraftAttention, i: int) -> int:
    """Tokens of request i that its last real row sees: those of MHA, but for MLA's draft steps."""
    is_step = batch.forward_mode.query_rows is QueryRows.ONE and batch.spec_info is not None
    return int(batch.seq_lens[i]) if is_step and attention is MLA else key_length(batch, i)


def told_keys(batch: ForwardBatch, attention: DraftAttention, i: int, width: int) -> int:
    """`seq_lens_k` of request i where its rows lie in front of a block of so many."""
    padding = width - query_length(batch, i) if batch.forward_mode.query_rows.in_extend_seq_lens else 0
    return own_keys(batch, attention, i) + padding


def table_row(pool: KVPool, row: int, own: int, told: int) -> list[int]:
    """Live cells: the request's own pages, then the sink where a padded query looks."""
    pages = live_pages(row, own, pool)
    return pages + [0] * (math.ceil(max(told, 0) / pool.page_size) - len(pages))


def assert_live_part_right(
    got: Any, batch: ForwardBatch, pool: KVPool, attention: DraftAttention, width: int
) -> list[list[int]]:
    """Lengths and live cells against the loops; returns what lies after each row's live cells."""
    told = [told_keys(batch, attention, i, width) for i in range(batch.batch_size)]
    assert (got.seq_lens_k.dtype, got.seq_lens_k.tolist()) == (torch.int32, told)
    assert got.max_seq_len_q == width
    assert got.block_kv_indices.dtype == torch.int32
    assert got.block_kv_indices.stride(1) == 1
    tails = []
    for i, cells in enumerate(got.block_kv_indices.tolist()):
        live = table_row(pool, int(batch.req_pool_indices[i]), own_keys(batch, attention, i), told[i])
        assert cells[: len(live)] == live, f"live cells of request {i}"
        tails.append(cells[len(live) :])
    return tails


@dataclass(frozen=True, eq=False)
class Served:
    """A batch whose cache was written token by token, and what attention over its histories gives.

    Attributes:
        query: float64 [num_tokens, HEADS, RANK + ROPE].
        expected: float64 [rows of the requests, HEADS, RANK].
    """

    batch: ForwardBatch
    query: Tensor
    expected: Tensor


class Engine:
    """A pool with shuffled pages of which every token's entry is known, and what was never written is huge."""

    def __init__(
        self, page_size: int = 32, *, num_requests: int = 6, max_context_len: int = 150, seed: int = 0
    ) -> None:
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
        """A batch over new requests of so many tokens, the last `news` of them this pass's; and the requests' rows.

        In verification seq_lens leaves out the new tokens, in draft step s the last s + 1.
        """
        step = mode.draft_step if isinstance(mode, GraphMode) else None
        forward_mode = mode.forward_mode if isinstance(mode, GraphMode) else mode
        rows = self.admit(totals)
        uncounted = 0 if step is None else step + 1
        verifies = forward_mode.uncounted is UncountedTokens.QUERY_ROWS
        extends = forward_mode.query_rows.in_extend_seq_lens
        seq_lens = [total - (new if verifies else uncounted) for total, new in zip(totals, news, strict=True)]
        slots = [self.pool.slots(row, total - new, total) for row, total, new in zip(rows, totals, news, strict=True)]
        spec_info = None if step is None else SpecInfo(speculative_step_id=step)
        if verifies:
            spec_info = SpecInfo(num_draft_tokens=mode.num_tokens_per_req if isinstance(mode, GraphMode) else max(news))
        batch = ForwardBatch(
            forward_mode=forward_mode,
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(seq_lens),
            out_cache_loc=torch.cat(slots),
            num_tokens=sum(news) + num_padding_rows,
            extend_seq_lens=torch.tensor(news) if extends else None,
            extend_seq_lens_cpu=news if extends else None,
            seq_lens_cpu=seq_lens if host_lengths else None,
            spec_info=spec_info,
        )
        query = self.draw(batch.num_tokens, HEADS, RANK + ROPE)
        expected, first = [], 0
        for row, total, new in zip(rows, totals, news, strict=True):
            seen = total - uncounted if step is not None and attention is MLA else total
            expected.append(dense_attention(query[first : first + new], self.history[row][:seen]))
            first += new
        return Served(batch, query, torch.cat(expected)), rows


def dense_attention(query: Tensor, entries: Tensor) -> Tensor:
    """Causal, one row at a time; the last row sees all entries. [rows, HEADS, RANK + ROPE] -> [rows, HEADS, RANK]."""
    out = []
    for j, row in enumerate(query):
        seen = entries[: len(entries) - len(query) + j + 1]
        weights = torch.softmax(LAYER.softmax_scale * row @ seen.T, dim=-1)
        out.append(weights @ seen[:, :RANK])
    return torch.stack(out)
