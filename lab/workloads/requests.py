"""Requests of one forward pass in a pool: admitted, their histories written into a cache, and the batch of any mode over them.

Whoever needs a batch makes it here, from each request's tokens before the pass and its query rows::

    pool = new_pool(kv_lens, page_size=64, max_context_len=4096, device=device)
    requests = admit(pool, prefix_lens, q_lens)
    requests.write(cache, histories)
    batch = requests.batch(ForwardMode.TARGET_VERIFY)

A pool that holds requests with long histories gives many batches over prefixes of them: write them once, as requests without
query rows, and make a `Requests` of some of their rows for each batch::

    admitted = admit(pool, (max_context_len,) * 5, (0,) * 5)
    admitted.write(cache, histories)
    batch = Requests(pool, admitted.rows[1:3], prefix_lens=(16, 33), q_lens=(4, 4)).batch(mode)

The loops of `lab.references` know nothing of this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lab.metadata.engine.forward_batch import FROZEN_KV_STEP, ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows, UncountedTokens
from lab.metadata.engine.kv_pool import KVPool, PagedKVCache, PagedLatentCache, ShardedLatentCache

# A request's tokens as a cache stores them, by position: (K, V), each [kv_len, num_kv_heads, head_dim], or its latent entries
# alone, [kv_len, entry_dim].
History = tuple[Tensor, ...]


class PassLens:
    """Lengths that follow from those of a forward pass's requests; for dataclasses that have the attributes.

    Attributes:
        prefix_lens: tokens of each request before the pass.
        q_lens: query rows of each request, its newest tokens.
        draft_step: number of a draft step, from 0, whose row is the last of that many drafted tokens and its own; or
            `FROZEN_KV_STEP`, whose row is at the last token of the prefix and has no K and V of its own; or None.
        num_draft_tokens: most rows that a request may have in a ragged verification; None: as many as one has.
        topk: rows next to each other that are branches of one request; lengths stand for rows.
    """

    prefix_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    draft_step: int | None = None
    num_draft_tokens: int | None = None
    topk: int = 1

    @cached_property
    def new_tokens(self) -> tuple[int, ...]:
        """Return the tokens of each request after its prefix: query rows, and in a draft step those drafted before."""
        return _new_tokens(self.q_lens, self.draft_step)

    @cached_property
    def kv_lens(self) -> tuple[int, ...]:
        """Return the tokens of each request with this pass's."""
        return tuple(prefix + new for prefix, new in zip(self.prefix_lens, self.new_tokens, strict=True))

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Return the position of each request's first query row."""
        return tuple(kv_len - q_len for kv_len, q_len in zip(self.kv_lens, self.q_lens, strict=True))

    @cached_property
    def first_written(self) -> tuple[int, ...]:
        """Return the position of each request's first token whose K and V the pass writes: of its first row, or the end."""
        return self.kv_lens if self.draft_step == FROZEN_KV_STEP else self.first_rows


@dataclass(frozen=True, eq=False)
class Requests(PassLens):
    """Requests that a pool holds, as one forward pass sees them.

    Attributes:
        pool: holds the requests; it may hold more tokens of each than the pass sees.
        rows: ``req_pool_index`` of each request; at least one.
        prefix_lens, q_lens, draft_step, num_draft_tokens: as in `PassLens`.

    Raises:
        ValueError: no request, or not one length of each kind per request.
    """

    pool: KVPool
    rows: tuple[int, ...]
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
        """Return the slots of the query rows, [sum(q_lens)] int64; none in a frozen-KV draft.

        Raises:
            ValueError: the pool does not hold the requests, or fewer of their tokens.
        """
        return torch.cat(
            [self.pool.slots(*each) for each in zip(self.rows, self.first_written, self.kv_lens, strict=True)]
        )

    def evict(self, window_left: int) -> tuple[int, ...]:
        """Give back the sliding-window pages that no row of the pass sees.

        Args:
            window_left: keys to the left of a row that it sees, 0 or more.

        Returns:
            The first position of each request that is still in the sliding-window pool.
        """
        kept = []
        for row, first_row in zip(self.rows, self.first_rows, strict=True):
            before = max(0, first_row - window_left)
            self.pool.evict_swa(row, before)
            kept.append(before // self.pool.page_size * self.pool.page_size)
        return tuple(kept)

    def write(
        self,
        cache: PagedKVCache | PagedLatentCache | ShardedLatentCache,
        histories: Sequence[History],
        first: Sequence[int] | None = None,
        *,
        sliding_window: bool = False,
    ) -> None:
        """Write the tokens of each history into its request's slots.

        Args:
            cache: of the pool.
            histories: one for each request, no longer than the tokens that the pool holds of it.
            first: position of the first token of each that is written; 0 if left out.
            sliding_window: the cache is of the sliding-window pool.
        """
        starts = (0,) * len(self.rows) if first is None else first
        for row, history, start in zip(self.rows, histories, starts, strict=True):
            slots = self.pool.slots(row, start, len(history[0]))
            slots = self.pool.swa_slots(slots) if sliding_window else self.pool.physical_slots(slots)
            cache.write(slots, *(side[start:] for side in history))

    def batch(self, mode: ForwardMode, num_padding_rows: int = 0) -> ForwardBatch:
        """Return the batch of a mode over these requests, in fresh tensors.

        Args:
            mode: one that attends.
            num_padding_rows: query rows after the requests', which belong to none and have no slot.

        Raises:
            ValueError: the mode has no such rows, or the pool no such tokens.
        """
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
    """Return an empty pool with room for requests of these lengths.

    Args:
        lens: most tokens of each request.
        page_size, max_context_len, seed, device: as `KVPool` has them.
        spare_pages: pages beyond those of the requests and the sink.
        swa_spare_pages: the same of a sliding-window pool; None for a pool without one.
        virtual_slots: slots name three times as many pages as there are.
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
    """Return the number of pages of requests of these lengths; they share no page."""
    return sum(-(-length // page_size) for length in lens)


def admit(
    pool: KVPool,
    prefix_lens: Sequence[int],
    q_lens: Sequence[int],
    draft_step: int | None = None,
    num_draft_tokens: int | None = None,
    topk: int = 1,
) -> Requests:
    """Admit requests to a pool, with slots for their prefixes and their new tokens.

    Args:
        pool: has rows and pages for them.
        prefix_lens, q_lens, draft_step, num_draft_tokens, topk: as in `PassLens`; every branch of a request has its row of the
            pool.

    Raises:
        RuntimeError: too few rows or pages are left.
        ValueError: a request is longer than the pool's ``max_context_len``, or the lengths do not fit each other.
    """
    new_tokens = _new_tokens(q_lens, draft_step)
    lens = [prefix + new for prefix, new in zip(prefix_lens, new_tokens, strict=True)]
    rows = [row for length in lens[::topk] for row in (pool.add_request(length),) * topk]
    return Requests(pool, tuple(rows), tuple(prefix_lens), tuple(q_lens), draft_step, num_draft_tokens)


def _new_tokens(q_lens: Sequence[int], draft_step: int | None) -> tuple[int, ...]:
    return tuple(q_lens) if draft_step is None else (draft_step + 1,) * len(q_lens)


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
    """Return the batch of a mode, with the lengths, host lists and `SpecInfo` of an engine.

    Nothing is read from the device.

    Args:
        mode: one that attends.
        rows: ``req_pool_index`` of each request, [batch_size] int64.
        prefix_lens: tokens of each request before the pass, [batch_size] int64; the batch's own lengths where the mode does not
            count its new tokens.
        q_lens: query rows of each request.
        slots: of the query rows, [sum(q_lens)] int64.
        prefix_lens_cpu: `prefix_lens` on the host, which prefills need.
        draft_step: the number of a draft step, or `FROZEN_KV_STEP`, in DECODE; else None.
        num_draft_tokens: most rows of a request in RAGGED_VERIFY; None: as many as one has.
        num_padding_rows: query rows after the requests'.

    Raises:
        ValueError: the mode has no such rows.
    """
    new_lens = None
    if mode.query_rows.in_extend_seq_lens:
        new_lens = torch.tensor(q_lens, dtype=torch.int32, device=rows.device)
    seq_lens = prefix_lens
    if mode.uncounted is UncountedTokens.NONE or (mode.uncounted is UncountedTokens.DRAFT_STEP and draft_step is None):
        seq_lens = prefix_lens + (1 if new_lens is None else new_lens)
    most_rows = num_draft_tokens or max(q_lens, default=0)
    if mode.query_rows is QueryRows.FIXED and len(set(q_lens)) > 1:
        most_rows = -1  # no number of rows is fixed
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
