"""An engine's memory management: rows of the request table, slots, pages, and sliding-window pages for each request."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.metadata.engine.kv_cache import KVLayout, PagedKVCache, PagedLatentCache, ShardedLatentCache


@dataclass
class _Request:
    length: int
    pages: list[int]  #: pages of the full pool; virtual pages if the pool has them
    swa_pages: list[int | None]  #: None for an evicted page
    physical_pages: list[int]  #: the caches' pages to which virtual `pages` are mapped; else empty


class KVPool:
    """Allocates slots (places for one token's K and V) to requests. It does the work of SGLang's request table, page allocator
    and sliding-window pool.

    A slot is ``page * page_size + offset``. Page 0 is the sink: padding rows write to it, and no request gets it. Pages and
    rows of the request table are allocated in shuffled order, so that code which is right only for consecutive ids fails. A
    request fills its last page before it gets another. A freed id is allocated again after all other free ids. The request
    table keeps the entries of freed requests, as an engine's does.

    With ``num_virtual_pages`` slots are virtual, as in SGLang's unified pool: they refer to virtual pages, which `v2p` maps to
    pages of the caches. Code that reads or writes a cache of the full pool must translate slots by `pages` or `physical_slots`.
    `full_to_swa` translates virtual slots to the sliding-window pool directly.

    All bookkeeping is on the host; no method reads the device.

    Args:
        num_requests, max_context_len: largest numbers of requests at a time, and of tokens of one request.
        num_pages: pages of the full pool (for layers without a sliding window), sink included.
        swa_num_pages: pages of the sliding-window pool, its own sink included, or None for no such pool.
        num_virtual_pages: number of virtual pages, sink included, at least ``num_pages``; None: slots refer to pages of the
            caches.
        seed: seed of the order in which pages and rows are allocated.

    Attributes:
        block_table_width: number of columns of a page table, the pages of a request of ``max_context_len`` tokens.
        req_to_token: ``[num_requests + 1, max_context_len]`` int32, the slot of each token of each request; row 0 is reserved
            for padding and is all zeros.
        full_to_swa: ``[pages * page_size + 1]`` int64, where ``pages`` is ``num_virtual_pages`` if given, else ``num_pages``:
            the sliding-window slot of each slot, 0 if it has none. The last entry is -1, so that slot -1 stays -1. None without
            a sliding-window pool.
        v2p: ``[num_virtual_pages]`` int64, the page of the caches for each virtual page: -1 if it has none, 0 for page 0. None
            without virtual pages.

    Raises:
        ValueError: a size is too small. Methods raise it if the given request is not in the pool.
    """

    def __init__(
        self,
        *,
        num_requests: int,
        max_context_len: int,
        page_size: int,
        num_pages: int,
        swa_num_pages: int | None = None,
        num_virtual_pages: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {"num_requests": num_requests, "max_context_len": max_context_len, "page_size": page_size}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        for name, pages in (("num_pages", num_pages), ("swa_num_pages", swa_num_pages)):
            if pages is not None and pages < 2:
                raise ValueError(f"{name}={pages} must be at least 2: page 0 is the sink and is never handed out")
        if num_virtual_pages is not None and num_virtual_pages < num_pages:
            raise ValueError(f"num_virtual_pages={num_virtual_pages} must be at least num_pages={num_pages}")
        self.num_requests = num_requests
        self.max_context_len = max_context_len
        self.page_size = page_size
        self.num_pages = num_pages
        self.swa_num_pages = swa_num_pages
        self.num_virtual_pages = num_virtual_pages
        self.block_table_width = -(-max_context_len // page_size)
        self.req_to_token = torch.zeros(num_requests + 1, max_context_len, dtype=torch.int32, device=device)
        self.device = self.req_to_token.device
        named_pages = num_virtual_pages or num_pages
        self.full_to_swa: Tensor | None = None
        if swa_num_pages is not None:
            self.full_to_swa = torch.zeros(named_pages * page_size + 1, dtype=torch.int64, device=device)
            self.full_to_swa[-1] = -1
        self.v2p: Tensor | None = None
        if num_virtual_pages is not None:
            self.v2p = torch.full((num_virtual_pages,), -1, dtype=torch.int64, device=device)
            self.v2p[0] = 0
        generator = torch.Generator().manual_seed(seed)
        self._free_rows = _shuffled_ids(num_requests + 1, generator)
        self._free_pages = _shuffled_ids(named_pages, generator)
        self._free_swa_pages = _shuffled_ids(swa_num_pages or 1, generator)
        self._free_physical_pages = _shuffled_ids(num_pages, generator)
        self._requests: dict[int, _Request] = {}

    def add_request(self, length: int) -> int:
        """Add a request of ``length`` tokens. Return its req_pool_index (its row in the request table), which is never 0.

        Raises:
            RuntimeError: no row or too few pages are left; nothing is changed then.
            ValueError: ``length`` is negative or above ``max_context_len``.
        """
        if not self._free_rows:
            raise RuntimeError(f"all {self.num_requests} request rows are taken: free a request or raise num_requests")
        row = self._free_rows[0]
        self._requests[row] = _Request(length=0, pages=[], swa_pages=[], physical_pages=[])
        try:
            self.extend_request(row, length)
        except (RuntimeError, ValueError):
            del self._requests[row]
            raise
        self._free_rows.popleft()
        return row

    def extend_request(self, req_pool_index: int, count: int) -> Tensor:
        """Append ``count`` tokens, and return their slots, ``[count]`` int64. Raise RuntimeError if no page is free."""
        request = self._request(req_pool_index)
        start, end = request.length, request.length + count
        if count < 0:
            raise ValueError(f"cannot add {count} tokens: the count must be 0 or more")
        if end > self.max_context_len:
            raise ValueError(
                f"request {req_pool_index} would hold {end} tokens, more than max_context_len={self.max_context_len}"
            )
        num_new = -(-end // self.page_size) - len(request.pages)
        free = self._free_pages if self.v2p is None else self._free_physical_pages
        self._require_pages("full", "num_pages", free, num_new)
        if self.full_to_swa is not None:
            self._require_pages("sliding-window", "swa_num_pages", self._free_swa_pages, num_new)
        new_pages = [self._free_pages.popleft() for _ in range(num_new)]
        request.pages += new_pages
        if self.v2p is not None:
            new_physical_pages = [self._free_physical_pages.popleft() for _ in range(num_new)]
            request.physical_pages += new_physical_pages
            self.v2p[_ids(new_pages, self.device)] = _ids(new_physical_pages, self.device)
        if self.full_to_swa is not None:
            new_swa_pages = [self._free_swa_pages.popleft() for _ in range(num_new)]
            request.swa_pages += new_swa_pages
            self._map_pages(new_pages, self._slots_of_pages(new_swa_pages))
        first_page = start // self.page_size
        skipped = first_page * self.page_size
        slots = self._slots_of_pages(request.pages[first_page:]).flatten()[start - skipped : end - skipped]
        self.req_to_token[req_pool_index, start:end] = slots.to(torch.int32)
        request.length = end
        return slots

    def slots(self, req_pool_index: int, start: int, end: int) -> Tensor:
        """Return the slots of the tokens at positions ``start .. end - 1`` of a request, ``[end - start]`` int64."""
        length = self._request(req_pool_index).length
        if not 0 <= start <= end <= length:
            raise ValueError(f"positions {start}..{end} are outside request {req_pool_index} of {length} tokens")
        return self.req_to_token[req_pool_index, start:end].to(torch.int64)

    def pages(self, slots: Tensor) -> Tensor:
        """Return the page of each slot in the caches of the full pool: int32, in the shape of `slots`. Slot -1 is in page -1,
        or in page 0 if the pool has virtual pages. A slot whose virtual page is not mapped is also in page 0 (for padding).
        """
        pages = slots // self.page_size
        return (pages if self.v2p is None else self.v2p[pages.clamp(min=0)].clamp(min=0)).to(torch.int32)

    def physical_slots(self, slots: Tensor) -> Tensor:
        """Return the index of each slot in the caches of the full pool: int64, same shape.

        Without virtual pages, the index is the slot. With virtual pages, `v2p` maps the slot's page to a page of the caches.
        Slot -1, and a slot whose page is not mapped, have index 0, which is reserved for padding.
        """
        if self.v2p is None:
            return slots
        pages = self.v2p[(slots // self.page_size).clamp(min=0)]
        return (pages * self.page_size + slots % self.page_size).masked_fill((slots < 0) | (pages < 0), 0)

    def swa_slots(self, full_slots: Tensor) -> Tensor:
        """Return the slot in the sliding-window pool for each slot of the full pool: int64, same shape. The result is -1 for
        slot -1, and 0 for a token whose sliding-window page was evicted.
        """
        return self._swa_map()[full_slots.to(torch.int64)]

    def evict_swa(self, req_pool_index: int, before: int) -> None:
        """Free the sliding-window pages of a request that lie completely before position ``before``."""
        request = self._request(req_pool_index)
        self._swa_map()
        if not 0 <= before <= request.length:
            raise ValueError(f"before={before} is outside request {req_pool_index} of {request.length} tokens")
        self._release_swa(request, before // self.page_size)

    def free_request(self, req_pool_index: int) -> None:
        request = self._request(req_pool_index)
        if self.full_to_swa is not None:
            self._release_swa(request, len(request.pages))
        if self.v2p is not None:
            self.v2p[_ids(request.pages, self.device)] = -1
            self._free_physical_pages.extend(request.physical_pages)
        self._free_pages.extend(request.pages)
        self._free_rows.append(req_pool_index)
        del self._requests[req_pool_index]

    def new_cache(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, layout: KVLayout, sliding_window: bool = False
    ) -> PagedKVCache:
        """Make a zero-filled cache of one layer with the pages of the full or of the sliding-window pool. `head_dim` counts
        elements of `dtype`: half the head's size for packed 4-bit values in uint8.
        """
        num_pages = self.num_pages
        if sliding_window:
            self._swa_map()
            assert self.swa_num_pages is not None
            num_pages = self.swa_num_pages
        page = (self.page_size, num_kv_heads) if layout is KVLayout.NHD else (num_kv_heads, self.page_size)
        storage = torch.zeros(2, num_pages, *page, head_dim, dtype=dtype, device=self.device)
        return PagedKVCache(storage, layout)

    def new_latent_cache(self, entry_dim: int, dtype: torch.dtype) -> PagedLatentCache:
        """Make a zero-filled MLA cache of one layer, with entries of `entry_dim` elements: latent vector, then rotary part."""
        storage = torch.zeros(self.num_pages, self.page_size, entry_dim, dtype=dtype, device=self.device)
        return PagedLatentCache(storage)

    def new_sharded_latent_cache(self, entry_dim: int, dtype: torch.dtype, size: int) -> ShardedLatentCache:
        """Make a zero-filled MLA cache of one layer, divided among `size` ranks; `size` must divide the page size."""
        pages = (size, self.num_pages, self.page_size // size, entry_dim)
        return ShardedLatentCache(torch.zeros(pages, dtype=dtype, device=self.device))

    def _request(self, req_pool_index: int) -> _Request:
        if req_pool_index not in self._requests:
            raise ValueError(f"req_pool_index={req_pool_index} holds no request; live are {sorted(self._requests)}")
        return self._requests[req_pool_index]

    def _swa_map(self) -> Tensor:
        if self.full_to_swa is None:
            raise ValueError("this pool has no sliding-window pages: make it with KVPool(..., swa_num_pages=...)")
        return self.full_to_swa

    def _require_pages(self, pool: str, argument: str, free: deque[int], count: int) -> None:
        if count > len(free):
            raise RuntimeError(
                f"the {pool} pool has {len(free)} free pages of {self.page_size} tokens, {count} are needed: "
                f"free a request{'' if argument == 'num_pages' else ' or evict its pages'}, or raise {argument}"
            )

    def _slots_of_pages(self, pages: list[int]) -> Tensor:
        starts = _ids(pages, self.device) * self.page_size
        return starts[:, None] + torch.arange(self.page_size, device=self.device)

    def _map_pages(self, pages: list[int], swa_slots: Tensor | int) -> None:
        self._swa_map()[:-1].view(-1, self.page_size)[_ids(pages, self.device)] = swa_slots

    def _release_swa(self, request: _Request, num_pages: int) -> None:
        held = [(i, page) for i, page in enumerate(request.swa_pages[:num_pages]) if page is not None]
        self._map_pages([request.pages[i] for i, _ in held], 0)
        for i, page in held:
            request.swa_pages[i] = None
            self._free_swa_pages.append(page)


def _ids(pages: list[int], device: torch.device) -> Tensor:
    return torch.tensor(pages, dtype=torch.int64, device=device)


def _shuffled_ids(count: int, generator: torch.Generator) -> deque[int]:
    return deque((torch.randperm(count - 1, generator=generator) + 1).tolist())
