"""Requests of one forward pass: admit them to a K/V pool, write their tokens' K and V into a cache, and make a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lab.metadata.engine.forward_batch import FROZEN_KV_STEP, ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows, UncountedTokens
from lab.metadata.engine.kv_pool import KVPool, PagedKVCache, PagedLatentCache, ShardedLatentCache
from lab.metadata.mla.dsv4 import DSV4Cache

# A request's tokens as a cache stores them, by position: (K, V), each [kv_len, num_kv_heads, head_dim], or (entries,) for MLA,
# [kv_len, entry_dim].
History = tuple[Tensor, ...]


class PassLens:
    """The lengths of the requests in a forward pass: prefixes and query rows. Base class of dataclasses."""

    prefix_lens: tuple[int, ...]  #: tokens of each request before the pass
    q_lens: tuple[int, ...]  #: query rows of each request, its newest tokens
    #: number s of a draft step, from 0: its row is the token after the prefix and s drafted tokens. In `FROZEN_KV_STEP` the row
    #: is at the last token of the prefix and has no K and V of its own. None in other passes
    draft_step: int | None = None
    num_draft_tokens: int | None = None  #: most rows that a ragged verification permits; None: the largest of `q_lens`
    topk: int = 1  #: draft branches of each request. They lie next to each other in the lengths, one entry per branch

    @cached_property
    def kv_lens(self) -> tuple[int, ...]:
        """Return the number of tokens of each request, including this pass's tokens and, in a draft step, earlier drafts."""
        return _kv_lens(self.prefix_lens, self.q_lens, self.draft_step)

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        return tuple(kv_len - q_len for kv_len, q_len in zip(self.kv_lens, self.q_lens, strict=True))

    @cached_property
    def first_written(self) -> tuple[int, ...]:
        """Return each request's first position whose K and V the pass writes; the request's length if it writes none."""
        return self.kv_lens if self.draft_step == FROZEN_KV_STEP else self.first_rows


@dataclass(frozen=True, eq=False)
class Requests(PassLens):
    """The requests of one forward pass, admitted to a K/V pool. `PassLens` describes the fields that have no comment here."""

    pool: KVPool  #: holds the requests, and may hold more tokens of a request than the pass sees
    rows: tuple[int, ...]  #: ``req_pool_index`` of each request
    prefix_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    draft_step: int | None = None
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.rows or not len(self.rows) == len(self.prefix_lens) == len(self.q_lens):
            raise ValueError(
                f"rows {self.rows}, prefix_lens {self.prefix_lens} and q_lens {self.q_lens}: one each per request, and at "
                "least one request"
            )

    def slots(self) -> Tensor:
        return torch.cat([*map(self.pool.slots, self.rows, self.first_written, self.kv_lens)])

    def evict(self, window_left: int) -> tuple[int, ...]:
        """Evict the sliding-window pages that no query row sees. Return the first remaining position of each request."""
        kept = []
        for row, first_row in zip(self.rows, self.first_rows, strict=True):
            before = max(0, first_row - window_left)
            self.pool.evict_swa(row, before)
            kept.append(before // self.pool.page_size * self.pool.page_size)
        return tuple(kept)

    def write(
        self,
        cache: PagedKVCache | PagedLatentCache | ShardedLatentCache | DSV4Cache,
        histories: Sequence[History],
        first: Sequence[int] | None = None,
        *,
        sliding_window: bool = False,
    ) -> None:
        """Write each history from token `first[i]` (None: 0) on. `sliding_window`: to slots of the sliding-window pool."""
        starts = (0,) * len(self.rows) if first is None else first
        in_cache = self.pool.swa_slots if sliding_window else self.pool.physical_slots
        for row, history, start in zip(self.rows, histories, starts, strict=True):
            slots = self.pool.slots(row, start, len(history[0]))
            cache.write(in_cache(slots), *(side[start:] for side in history))

    def batch(self, mode: ForwardMode, num_padding_rows: int = 0) -> ForwardBatch:
        return forward_batch(
            mode,
            torch.tensor(self.rows, device=self.pool.device),
            torch.tensor(self.prefix_lens, device=self.pool.device),
            self.q_lens,
            self.slots(),
            prefix_lens_cpu=self.prefix_lens,
            draft_step=self.draft_step,
            num_draft_tokens=self.num_draft_tokens,
            num_padding_rows=num_padding_rows,
        )


def new_pool(
    lens: Sequence[int],
    *,
    page_size: int,
    max_context_len: int,
    spare_pages: int = 0,
    swa_spare_pages: int | None = None,
    virtual_slots: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> KVPool:
    """Return an empty K/V pool with pages for requests of these lengths, `spare_pages` more, and page 0 for padding rows. It
    has a sliding-window pool unless `swa_spare_pages` is None, and with `virtual_slots` three virtual pages for each page.
    """
    pages = num_pages(lens, page_size) + 1
    return KVPool(
        num_requests=len(lens),
        max_context_len=max_context_len,
        page_size=page_size,
        num_pages=pages + spare_pages,
        swa_num_pages=None if swa_spare_pages is None else pages + swa_spare_pages,
        num_virtual_pages=3 * (pages + spare_pages) if virtual_slots else None,
        seed=seed,
        device=device,
    )


def num_pages(lens: Sequence[int], page_size: int) -> int:
    return sum(-(-length // page_size) for length in lens)


def admit(
    pool: KVPool,
    prefix_lens: Sequence[int],
    q_lens: Sequence[int],
    draft_step: int | None = None,
    num_draft_tokens: int | None = None,
    topk: int = 1,
) -> Requests:
    """Admit requests to a K/V pool, with slots for all tokens. The `topk` draft branches of a request share its slots."""
    lens = _kv_lens(prefix_lens, q_lens, draft_step)
    rows = [row for length in lens[::topk] for row in (pool.add_request(length),) * topk]
    return Requests(pool, tuple(rows), tuple(prefix_lens), tuple(q_lens), draft_step, num_draft_tokens)


def _kv_lens(prefix_lens: Sequence[int], q_lens: Sequence[int], draft_step: int | None) -> tuple[int, ...]:
    new = q_lens if draft_step is None else (draft_step + 1,) * len(q_lens)
    return tuple(prefix + tokens for prefix, tokens in zip(prefix_lens, new, strict=True))


def forward_batch(
    mode: ForwardMode,
    rows: Tensor,
    prefix_lens: Tensor,
    q_lens: Sequence[int],
    slots: Tensor,
    *,
    prefix_lens_cpu: Sequence[int] | None = None,
    draft_step: int | None = None,
    num_draft_tokens: int | None = None,
    num_padding_rows: int = 0,
) -> ForwardBatch:
    """Return the `ForwardBatch` that an engine makes for these requests, without a read from the device.

    Args:
        rows: ``req_pool_index`` of each request, [batch_size] int64.
        prefix_lens: tokens of each request before the pass, [batch_size] int64. In modes whose `seq_lens` do not count the
            tokens of the pass, this tensor is the batch's `seq_lens`. Prefills need `prefix_lens_cpu` too.
        slots: slots of the query rows, [sum(q_lens)] int64.
    """
    new_lens = None
    if mode.query_rows.in_extend_seq_lens:
        new_lens = torch.tensor(q_lens, dtype=torch.int32, device=rows.device)
    seq_lens = prefix_lens
    if mode.uncounted is UncountedTokens.NONE or (mode.uncounted is UncountedTokens.DRAFT_STEP and draft_step is None):
        seq_lens = prefix_lens + (1 if new_lens is None else new_lens)
    most_rows = num_draft_tokens or max(q_lens, default=0)
    if mode.query_rows is QueryRows.FIXED and len(set(q_lens)) > 1:
        most_rows = -1  # the number of rows per request is not fixed
    return ForwardBatch(
        forward_mode=mode,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        out_cache_loc=slots,
        num_tokens=sum(q_lens) + num_padding_rows,
        extend_seq_lens=new_lens,
        extend_prefix_lens=None if new_lens is None else prefix_lens,
        extend_seq_lens_cpu=None if new_lens is None else tuple(q_lens),
        extend_prefix_lens_cpu=None if new_lens is None or prefix_lens_cpu is None else tuple(prefix_lens_cpu),
        spec_info=SpecInfo.of(mode, most_rows, draft_step=draft_step, num_accept_tokens=new_lens),
    )
