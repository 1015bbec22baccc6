"""The layout of a paged K/V cache in memory, for kernels that compute addresses of pages themselves."""

import math
from dataclasses import dataclass

import torch

from lab.calls.problem import PagedAttention


@dataclass(frozen=True, eq=False)
class StoredCache:
    """K and V of a paged cache, with the axes in the order in which they lie in memory."""

    layout: str  # "HND" or "NHD", the order of the axes of a page
    # [num_pages, num_kv_heads, page_size, head_dim] for HND, [num_pages, page_size, num_kv_heads, head_dim] for NHD
    k: torch.Tensor
    v: torch.Tensor
    page_bytes: int  # of one page of K, or of V
    distance_bytes: int  # from K's first page to V's first page

    @property
    def is_stacked(self) -> bool:
        """Return True if K and V are one contiguous tensor [num_pages, 2, ...]."""
        step_bytes = self.k.stride(0) * self.k.element_size()
        follows_each = step_bytes == 2 * self.page_bytes and self.distance_bytes == self.page_bytes
        return follows_each and self.k[:1].is_contiguous() and self.k.stride() == self.v.stride()

    @property
    def is_halves(self) -> bool:
        """Return True if K and V are contiguous in one allocation, and V begins a whole number of pages after K."""
        follows = self.distance_bytes > 0 and self.distance_bytes % self.page_bytes == 0
        return follows and share_memory(self.k, self.v) and self.k.is_contiguous() and self.v.is_contiguous()

    def stacked(self) -> torch.Tensor:
        (pages, *page), (step, *strides) = self.k.shape, self.k.stride()
        return self.k.as_strided((pages, 2, *page), (step, step // 2, *strides))


def stored_cache(problem: PagedAttention) -> StoredCache:
    """Return the memory layout of a call's K/V cache. The result's `layout` has no meaning if pages have gaps."""
    layout, k, v = "HND", problem.k_cache, problem.v_cache
    # With one head both layouts are the same memory, and the result is NHD, like an engine's pool.
    if k.stride(2) == k.shape[1] * k.shape[3]:
        layout, k, v = "NHD", k.transpose(1, 2), v.transpose(1, 2)
    page_bytes = math.prod(k.shape[1:]) * k.element_size()
    return StoredCache(layout, k, v, page_bytes, v.data_ptr() - k.data_ptr())


def share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def token_list(pool: torch.Tensor) -> torch.Tensor | None:
    """Return a pool as a view [tokens, num_kv_heads, head_dim]; None if its pages are not NHD or have gaps between them."""
    pages, heads, page_size, head_dim = pool.shape
    page, head, token, element = pool.stride()
    if pages > 1 and page != page_size * token:
        return None
    return pool.as_strided((pages * page_size, heads, head_dim), (token, head, element))


def no_token_list(problem: PagedAttention) -> str | None:
    for name, pool in (("K", problem.k_cache), ("V", problem.v_cache)):
        if token_list(pool) is None:
            return (
                f"finds a token by one number: {name}'s pages must touch and be NHD, not have strides {pool.stride()} of "
                "(page, head, token, element)"
            )
    return None
