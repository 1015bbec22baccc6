"""The paged cache of one layer: K and V in one allocation, or MLA's entries. An MLA entry is key and value at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.calls.problem import E4M3, HALF_DTYPES, INTERLEAVED_TOKENS, NVFP4_BLOCK
from lab.named_enum import NamedEnum


def saturated_e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448.0, 448.0).to(E4M3)


class KVLayout(str, NamedEnum):
    """FlashInfer's `kv_layout`: the order of the axes inside a page. N: tokens, H: heads, D: head_dim."""

    NHD = "NHD"
    HND = "HND"


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """The paged K/V cache of one layer. K and V are the two halves of one allocation."""

    #: contiguous ``[2, num_pages, page_size, num_kv_heads, head_dim]`` (NHD) or ``[2, num_pages, num_kv_heads, page_size,
    #: head_dim]`` (HND); K is ``storage[0]``. Some kernels address K and V from one base pointer, so that V must begin a whole
    #: number of pages after K. ``head_dim`` counts bytes if a byte holds two values
    storage: Tensor
    layout: KVLayout

    def __post_init__(self) -> None:
        if self.storage.dim() != 5 or self.storage.shape[0] != 2 or not self.storage.is_contiguous():
            raise ValueError(
                f"storage has shape {list(self.storage.shape)} and strides {list(self.storage.stride())}, expected a "
                "contiguous [2, num_pages, ., ., head_dim]: make it with KVPool.new_cache"
            )

    @property
    def k_cache(self) -> Tensor:
        return self.storage[0]

    @property
    def v_cache(self) -> Tensor:
        return self.storage[1]

    @property
    def page_size(self) -> int:
        return self.storage.shape[2 if self.layout is KVLayout.NHD else 3]

    @property
    def num_kv_heads(self) -> int:
        return self.storage.shape[3 if self.layout is KVLayout.NHD else 2]

    def as_hnd(self) -> tuple[Tensor, Tensor]:
        """Return K and V as views ``[num_pages, num_kv_heads, page_size, head_dim]``, as FlashInfer takes them."""
        if self.layout is KVLayout.HND:
            return self.k_cache, self.v_cache
        k, v = (_with_canonical_strides(cache.transpose(1, 2)) for cache in (self.k_cache, self.v_cache))
        return k, v

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store one token's K and V at each slot, bit for bit. The host reads nothing from the device.

        Args:
            slots: ``[n]`` int64. A row with a negative slot is written to slot 0, which is reserved for padding. If several
                slots are equal, any of their rows may remain.
            k, v: ``[n, num_kv_heads, head_dim]`` in the cache's dtype: quantise before writing.
        """
        k_pages, v_pages = self.storage if self.layout is KVLayout.NHD else self.storage.transpose(2, 3)
        _check_rows(slots, k=(k_pages, k), v=(v_pages, v))
        _write_rows(k_pages, slots, k)
        _write_rows(v_pages, slots, v)


def write_e4m3(
    cache: PagedKVCache,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    query: Tensor | None = None,
) -> Tensor | None:
    """Write K and V, ``[n, num_kv_heads, head_dim]`` float16 or bfloat16, to an e4m3 cache, quantised as in SGLang's fused
    write. Return `query` converted to e4m3 without a scale; None if `query` is None.

    A stored element is the float32 value times the float32 reciprocal of the scale, rounded once and saturated at ±448
    (`fused_fp8_qkv_kv_cache.cuh`). With context parallelism SGLang divides in the model's dtype instead, and so rounds twice
    (`MHATokenToKVPool.set_kv_buffer`).
    """
    if cache.storage.dtype != E4M3:
        raise TypeError(f"the fused write fills an e4m3 cache, not one of {cache.storage.dtype}: use cache.write")
    for name, side in (("k", k), ("v", v)):
        if side.dtype not in HALF_DTYPES:
            raise TypeError(f"{name} has dtype {side.dtype}, expected torch.float16 or torch.bfloat16")
    if min(k_scale, v_scale) <= 0:
        raise ValueError(f"k_scale={k_scale} and v_scale={v_scale} must be positive: they divide what is stored")
    cache.write(slots, _times_reciprocal(k, k_scale), _times_reciprocal(v, v_scale))
    return None if query is None else _times_reciprocal(query, 1.0)


def _times_reciprocal(values: Tensor, scale: float) -> Tensor:
    reciprocal = 1.0 / torch.tensor(scale, dtype=torch.float32, device=values.device)
    return saturated_e4m3(values.to(torch.float32) * reciprocal)


@dataclass(frozen=True, eq=False)
class NVFP4KVCache(PagedKVCache):
    """The paged K/V cache of one layer in NVFP4. A byte of `storage` has two e2m1 values; 16 elements have one e4m3 scale
    factor. The order of V's factors depends on the kernel.
    """

    #: e4m3, contiguous ``[2, num_pages, num_kv_heads, page_size, head_dim // 16]``: in HND order for both layouts
    scale_factors: Tensor
    #: True: V's scale factors are interleaved over 4 tokens of a page, as trtllm-gen reads them. With S factors per token,
    #: factor s of token t is at ``(t // 4) * 4 * S + 4 * s + t % 4`` in its head's part of the page. False: factor s of token t
    #: is at ``t * S + s``, as XQA reads them
    trtllm_gen: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        pages, heads, page_size = self.storage.shape[1], self.num_kv_heads, self.page_size
        expected = [2, pages, heads, page_size, 2 * self.storage.shape[4] // NVFP4_BLOCK]
        if list(self.scale_factors.shape) != expected or not self.scale_factors.is_contiguous():
            raise ValueError(
                f"scale_factors has shape {list(self.scale_factors.shape)}, expected a contiguous {expected}"
            )
        if self.trtllm_gen and page_size % INTERLEAVED_TOKENS:
            raise ValueError(
                f"page_size={page_size}: trtllm-gen interleaves V's scale factors over {INTERLEAVED_TOKENS} tokens, which a "
                "page must hold a whole number of"
            )

    @classmethod
    def over(cls, packed: PagedKVCache, *, trtllm_gen: bool) -> "NVFP4KVCache":
        """Make an NVFP4 cache in `packed`'s uint8 storage. Scale factors are 0. If `trtllm_gen`, V's are interleaved."""
        pages, width = packed.storage.shape[1], packed.storage.shape[4]
        shape = (2, pages, packed.num_kv_heads, packed.page_size, 2 * width // NVFP4_BLOCK)
        factors = torch.zeros(shape, dtype=torch.uint8, device=packed.storage.device).view(E4M3)
        return cls(packed.storage, packed.layout, factors, trtllm_gen)

    def write(self, slots: Tensor, k: Tensor, v: Tensor, *factors: Tensor) -> None:
        """Store one token's K, V and scale factors at each slot. A row with a negative slot is written to slot 0, the padding.

        Args:
            k, v: ``[n, num_kv_heads, head_dim // 2]`` uint8.
            factors: the scale factors of K and of V, e4m3 ``[n, num_kv_heads, head_dim // 16]`` each.
        """
        super().write(slots, k, v)
        (k_pages, v_pages), (k_factors, v_factors) = self.scale_factors.transpose(2, 3), factors
        _check_rows(slots, k_factors=(k_pages, k_factors), v_factors=(v_pages, v_factors))
        _write_rows(k_pages, slots, k_factors)
        if not self.trtllm_gen:
            _write_rows(v_pages, slots, v_factors)
            return
        slots = slots.clamp(min=0)
        page, token, count = slots // self.page_size, slots % self.page_size, self.scale_factors.shape[4]
        groups = self.scale_factors[1].flatten(2).unflatten(2, (-1, count, INTERLEAVED_TOKENS)).permute(0, 2, 4, 1, 3)
        groups[page, token // INTERLEAVED_TOKENS, token % INTERLEAVED_TOKENS] = v_factors


@dataclass(frozen=True, eq=False)
class PagedLatentCache:
    """The MLA cache of one layer. A token's entry is the key of all heads, and its latent part is their value."""

    storage: Tensor  #: contiguous ``[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]``

    def __post_init__(self) -> None:
        if self.storage.dim() != 3 or not self.storage.is_contiguous():
            raise ValueError(
                f"storage has shape {list(self.storage.shape)} and strides {list(self.storage.stride())}, expected a "
                "contiguous [num_pages, page_size, entry]: make it with KVPool.new_latent_cache"
            )

    @property
    def page_size(self) -> int:
        return self.storage.shape[1]

    def with_head_axis(self) -> Tensor:
        """Return a view ``[num_pages, 1, page_size, entry]``, as SGLang passes it to FlashInfer."""
        return self.storage.unsqueeze(1)

    def write(self, slots: Tensor, entries: Tensor) -> None:
        """Store one token's entry, ``[n, kv_lora_rank + qk_rope_head_dim]``, at each slot; with a negative slot, at slot 0."""
        _check_rows(slots, entries=(self.storage, entries))
        _write_rows(self.storage, slots, entries)


@dataclass(frozen=True, eq=False)
class ShardedLatentCache:
    """The MLA cache of one layer, divided among the n GPUs (ranks) of decode context parallelism. The entry of the pool's slot
    s (page * page_size + offset in the page) is in slot s // n of rank s % n.
    """

    #: contiguous ``[n, num_pages, page_size, kv_lora_rank + qk_rope_head_dim]``; a page of the pool has ``n * page_size``
    #: tokens
    storage: Tensor

    def of_rank(self, rank: int) -> PagedLatentCache:
        return PagedLatentCache(self.storage[rank])

    def write(self, slots: Tensor, entries: Tensor) -> None:
        """Store one token's entry at each slot of the pool, in the cache of the rank that holds the slot."""
        _check_rows(slots, entries=(self.storage[0], entries))
        size, slots = self.storage.shape[0], slots.clamp(min=0)
        rows = self.storage.shape[1] * self.storage.shape[2]
        _write_rows(self.storage.flatten(0, 1), slots % size * rows + slots // size, entries)


def _check_rows(slots: Tensor, **sides: tuple[Tensor, Tensor]) -> None:
    if slots.dtype != torch.int64:
        raise TypeError(f"slots has dtype {slots.dtype}, expected torch.int64")
    for name, (pages, rows) in sides.items():
        expected = [slots.shape[0], *pages.shape[2:]]
        if rows.dtype != pages.dtype:
            raise TypeError(f"{name} has dtype {rows.dtype}, the cache {pages.dtype}: quantise before writing")
        if list(rows.shape) != expected:
            raise ValueError(f"{name} has shape {list(rows.shape)}, expected {expected}")


def _write_rows(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    slots, page_size = slots.clamp(min=0), pages.shape[1]
    pages[slots // page_size, slots % page_size] = rows


def _with_canonical_strides(view: Tensor) -> Tensor:
    """Return a view whose axes of size 1 have a contiguous tensor's strides. A permuted cache of one head has stride(1) ==
    stride(2), which a TMA descriptor does not permit (FlashInfer issue 2232). SGLang 0.5.23 corrects the same strides.
    """
    strides = list(view.stride())
    for axis in reversed(range(view.dim() - 1)):
        if view.shape[axis] == 1 and strides[axis] == strides[axis + 1]:
            strides[axis] = strides[axis + 1] * view.shape[axis + 1]
    return view.as_strided(view.shape, strides)
