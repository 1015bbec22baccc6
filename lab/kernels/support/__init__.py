"""Which implementation takes which call on which GPU: the one place that knows, and says why not in a sentence.

Every limit below is keyed on (major, minor) compute capability and carries its source. The sentence is what a refused
call raises and what a skipped benchmark prints.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lab.calls.problem import HALF_DTYPES, PagedAttention
from lab.calls.ragged_context import RaggedAttention
from lab.gpus import SM100, Capability, capability_of, family_of, sm_name
from lab.kernels.support import mla
from lab.kernels.support.common import (
    E4M3,
    is_one,
    no_triton,
    portable_dtypes,
    share_memory,
    wrong_gpu,
)
from lab.kernels.support.common import Kernel as Kernel
from lab.kernels.support.common import triton_interprets as triton_interprets

Problem = PagedAttention | RaggedAttention
# Query elements that XQA keeps in shared memory at q_len_per_req 1 (FlashInfer 0.7.2, mha.cu `persistentQ`: 16 KiB).
XQA_QUERY_TILE_ELEMENTS = 8192


def decode_kernel(capability: Capability) -> Kernel:
    """What FlashInfer 0.7.2's `trtllm_batch_decode_with_kv_cache(backend="auto")` runs: trtllm-gen on SM10x, else XQA."""
    return Kernel.TRTLLM_GEN_DECODE if family_of(capability) is SM100 else Kernel.XQA


def context_kernel(capability: Capability) -> Kernel:
    """What an engine runs for extend: trtllm-gen's context kernel on SM10x, else fmha_v2 (SGLang 0.5.23)."""
    return Kernel.TRTLLM_GEN_CONTEXT if family_of(capability) is SM100 else Kernel.FMHA_V2


def mla_kernel(capability: Capability) -> Kernel:
    """What FlashInfer 0.7.2's `trtllm_batch_decode_with_kv_cache_mla(backend="auto")` comes to, CuTe DSL left aside."""
    return Kernel.TRTLLM_GEN_MLA if family_of(capability) is SM100 else Kernel.XQA_MLA


def why_not(kernel: Kernel, capability: Capability | None, problem: Problem) -> str | None:
    """Why `kernel` cannot solve `problem` on a GPU of this capability, as a sentence; None if it can.

    Args:
        kernel: the implementation.
        capability: (major, minor) of the GPU, or None for a CPU.
        problem: the checked call.
    """
    return _RULES[kernel](capability, problem)


def refuse_unsupported(kernel: Kernel, problem: Problem) -> None:
    """Raise NotImplementedError with `why_not`'s sentence if the kernel cannot solve the problem where it lies."""
    reason = why_not(kernel, capability_of(problem.query.device), problem)
    if reason is not None:
        raise NotImplementedError(reason)


@dataclass(frozen=True, eq=False)
class StoredCache:
    """K and V as they lie in memory, whatever views a call carries: what a kernel that counts pages must know.

    Attributes:
        layout: "HND" or "NHD", the order of a page's elements.
        k, v: [num_pages, num_kv_heads, page_size, head_dim] or [num_pages, page_size, num_kv_heads, head_dim], after it.
        page_bytes: of one page of K, or of V.
        distance_bytes: from K's first page to V's.
    """

    layout: str
    k: torch.Tensor
    v: torch.Tensor
    page_bytes: int
    distance_bytes: int

    @property
    def is_stacked(self) -> bool:
        """One contiguous [num_pages, 2, ...]: V's page behind each of K's."""
        step_bytes = self.k.stride(0) * self.k.element_size()
        behind_each = step_bytes == 2 * self.page_bytes and self.distance_bytes == self.page_bytes
        return behind_each and self.k[:1].is_contiguous() and not _strides_differ(self.k, self.v)

    @property
    def is_halves(self) -> bool:
        """Each contiguous, in one allocation, V whole pages behind K."""
        behind = self.distance_bytes > 0 and self.distance_bytes % self.page_bytes == 0
        return behind and share_memory(self.k, self.v) and self.k.is_contiguous() and self.v.is_contiguous()

    @property
    def is_one_pool(self) -> bool:
        """K and V are the same contiguous memory."""
        return self.distance_bytes == 0 and self.k.is_contiguous() and not _strides_differ(self.k, self.v)

    def stacked(self) -> torch.Tensor:
        """The [num_pages, 2, ...] tensor; only where `is_stacked`."""
        (pages, *page), (step, *strides) = self.k.shape, self.k.stride()
        return self.k.as_strided((pages, 2, *page), (step, step // 2, *strides))


def stored_cache(problem: PagedAttention) -> StoredCache:
    """The problem's cache as it is stored; `layout` means nothing for pages with gaps."""
    layout, k, v = "HND", problem.k_cache, problem.v_cache
    # One token of all heads after another: NHD. With one head the layouts are the same memory, and an engine's pool is NHD.
    if k.stride(2) == k.shape[1] * k.shape[3]:
        layout, k, v = "NHD", k.transpose(1, 2), v.transpose(1, 2)
    page_bytes = math.prod(k.shape[1:]) * k.element_size()
    return StoredCache(layout, k, v, page_bytes, v.data_ptr() - k.data_ptr())


def refuse_without_triton(device: torch.device) -> None:
    """Raise NotImplementedError with a sentence if Triton does not run the lab's kernels on this device."""
    reason = no_triton(capability_of(device))
    if reason is not None:
        raise NotImplementedError(reason)


def _portable(capability: Capability | None, problem: PagedAttention) -> str | None:
    name = Kernel.PORTABLE.value
    reason = portable_dtypes(name, capability, problem.query.dtype, problem.k_cache.dtype, problem.out_dtype)
    if reason is not None:
        return reason
    if problem.head_dim not in (64, 128, 256):
        return f"{name} is built for head_dim 64, 128 and 256, not {problem.head_dim}"
    if problem.page_size not in (16, 32, 64, 128):
        return f"{name} is built for page sizes 16, 32, 64 and 128, not {problem.page_size}"
    if problem.lse is not None and not problem.lse.is_contiguous():
        return f"{name} writes a contiguous lse only"
    return None


def _xqa(capability: Capability | None, problem: PagedAttention) -> str | None:
    """FlashInfer 0.7.2: `xqa`, `gen_xqa_module`, `xqa_batch_decode_with_kv_cache`, xqa_wrapper.cu and mha.cu."""
    if capability is None or capability[0] not in (9, 10, 12):
        return wrong_gpu("XQA", "SM90, SM100, SM103, SM120 and SM121", capability)
    return _xqa_dtypes(capability, problem) or _xqa_shapes(problem) or _xqa_arguments(problem)


def _xqa_dtypes(capability: Capability, problem: PagedAttention) -> str | None:
    q, kv = problem.query.dtype, problem.k_cache.dtype
    if q not in HALF_DTYPES:
        return f"XQA takes fp16 or bf16 queries, not {q}"
    if kv == torch.uint8 and capability[0] != 12:
        return f"XQA reads NVFP4 K/V on SM120 and SM121 only, not on {sm_name(capability)}"
    if kv not in (q, E4M3, torch.uint8):
        return f"XQA takes K/V in the query's dtype, e4m3 or NVFP4, not {kv}"
    if problem.out_dtype != q and (problem.out_dtype, kv) != (E4M3, E4M3):
        return f"XQA writes the query's dtype, or e4m3 with e4m3 K/V, not {problem.out_dtype}"
    # mha.cu applies its K/V scale to 8 and 4 bit K/V alone, but always divides the query's scale by it.
    if kv in HALF_DTYPES and not is_one(problem.bmm2_scale):
        return "XQA applies no bmm2_scale to fp16 and bf16 K/V: it must be the number 1.0; fold it into the output"
    if not isinstance(problem.bmm2_scale, torch.Tensor) and problem.bmm2_scale == 0:
        return "XQA divides by bmm2_scale: it must not be 0"
    return None


def _xqa_shapes(problem: PagedAttention) -> str | None:
    group = problem.num_qo_heads // problem.num_kv_heads
    if problem.page_size not in (16, 32, 64, 128):
        return f"XQA is built for page sizes 16, 32, 64 and 128, not {problem.page_size}"
    if problem.head_dim % 16 or not 16 <= problem.head_dim <= 512:
        return f"XQA needs a head_dim that is a multiple of 16 from 16 to 512, not {problem.head_dim}"
    if problem.head_dim > 256 and (problem.max_q_len > 1 or group > 16):
        return (
            f"XQA with head_dim {problem.head_dim} > 256 needs q_len_per_req 1 and at most 16 query heads per K/V head"
        )
    padded_head_dim = next(size for size in (64, 128, 256, 512) if size >= problem.head_dim)
    most_heads = XQA_QUERY_TILE_ELEMENTS // padded_head_dim
    if problem.max_q_len == 1 and group > most_heads:
        return (
            f"XQA with head_dim {problem.head_dim} and q_len_per_req 1 takes at most {most_heads} query heads per K/V "
            f"head, not {group}"
        )
    if problem.k_block_tables.shape[1] == 0:
        return "XQA takes the most keys from the page table's width, and block_tables has no column"
    return None


def _xqa_arguments(problem: PagedAttention) -> str | None:
    if problem.cu_seqlens_q is not None:
        return "XQA takes no cum_seq_lens_q through the decode call: every request needs q_len_per_req rows"
    if problem.k_block_tables is not problem.v_block_tables:
        return "XQA reads one page table for K and V: uses_shared_paged_kv_idx must be True"
    if problem.return_lse or problem.lse is not None:
        return "XQA computes no LSE"
    if problem.mask is not None and problem.max_q_len == 1:
        return "XQA ignores a mask at q_len_per_req 1"
    if _strides_differ(problem.k_cache, problem.v_cache):
        return "XQA reads V with K's strides, and they differ"
    if _strides_differ(problem.k_scale_factors, problem.v_scale_factors):
        return "XQA reads V's scale factors with the strides of K's, and they differ"
    for entries in (problem.k_cache, problem.k_scale_factors):
        if entries is not None and any(stride % entries.shape[3] for stride in entries.stride()[:3]):
            return f"XQA counts K/V strides in whole heads of {entries.shape[3]}, and they are {entries.stride()}"
    if not problem.query.is_contiguous():
        return "XQA needs a contiguous query"
    return None


def _fmha_v2(capability: Capability | None, problem: PagedAttention) -> str | None:
    """FlashInfer 0.7.2: `trtllm_fmha_v2_prefill`, fmha_v2_run.cu and its epilogues; SGLang 0.5.23's page sizes."""
    if capability is None or capability[0] not in (9, 12):
        return wrong_gpu("trtllm_fmha_v2_prefill", "SM90, SM120 and SM121", capability)
    q = problem.query.dtype
    if q not in HALF_DTYPES and (q != E4M3 or capability[0] == 12):
        return f"trtllm_fmha_v2_prefill takes fp16 and bf16 queries, and e4m3 on SM90 alone, not {q} on {sm_name(capability)}"
    if problem.k_cache.dtype != q:
        return f"trtllm_fmha_v2_prefill takes K/V in the query's dtype, not {problem.k_cache.dtype} with {q}"
    if problem.out_dtype != q and (q != E4M3 or problem.out_dtype not in HALF_DTYPES):
        return (
            f"trtllm_fmha_v2_prefill writes the query's dtype {q}{', fp16 or bf16' if q == E4M3 else ''}, "
            f"not {problem.out_dtype}"
        )
    if problem.page_size not in (16, 32, 64, 128):
        return f"trtllm_fmha_v2_prefill is taken for page sizes 16, 32, 64 and 128, not {problem.page_size}"
    if problem.head_dim not in (64, 128, 256):
        return f"trtllm_fmha_v2_prefill is taken for head_dim 64, 128 and 256, not {problem.head_dim}"
    if problem.cu_seqlens_q is None:
        return "trtllm_fmha_v2_prefill needs cum_seq_lens_q"
    if problem.return_lse or problem.lse is not None:
        return "trtllm_fmha_v2_prefill returns softmax statistics, not the LSE of this call"
    if isinstance(problem.bmm1_scale, torch.Tensor) or isinstance(problem.bmm2_scale, torch.Tensor):
        return "trtllm_fmha_v2_prefill takes its scales as host numbers, not as tensors"
    if problem.bmm1_scale == 0:
        return "trtllm_fmha_v2_prefill takes bmm1_scale 0 for 1 / sqrt(head_dim)"
    if problem.bmm1_scale < 0:
        return (
            f"trtllm_fmha_v2_prefill takes a row's maximum before it scales: bmm1_scale {problem.bmm1_scale} overflows"
        )
    if q in HALF_DTYPES and problem.bmm2_scale != 1:  # its 16 bit epilogues never read it
        return f"trtllm_fmha_v2_prefill applies no bmm2_scale to {q}: it must be 1.0, not {problem.bmm2_scale}"
    if not problem.query.is_contiguous():
        return "trtllm_fmha_v2_prefill needs a contiguous query"
    return _fmha_v2_cache(problem)


def _fmha_v2_cache(problem: PagedAttention) -> str | None:
    """It takes strides from shapes and counts all pages from K's first (`_check_paged_kv_non_interleaved`, fmha_v2_run.cu)."""
    stored = stored_cache(problem)
    if problem.k_block_tables is not problem.v_block_tables:
        if stored.is_one_pool and len(stored.k) > 1:
            return None
        return (
            "trtllm_fmha_v2_prefill counts the page ids of K and of V from one address: uses_shared_paged_kv_idx must be "
            "True, or K and V the same contiguous pool of two pages or more"
        )
    if stored.is_stacked or stored.is_halves:
        return None
    return (
        "trtllm_fmha_v2_prefill needs K and V to be one contiguous [num_pages, 2, ...] tensor, or contiguous halves of one "
        f"allocation, V whole pages behind K; got strides {stored.k.stride()} and {stored.v.stride()}, V "
        f"{stored.distance_bytes} bytes behind K, pages of {stored.page_bytes} bytes"
    )


def _trtllm_gen_decode(capability: Capability | None, problem: PagedAttention) -> str | None:
    if problem.mask is not None:
        return "trtllm-gen decode takes no mask: its rows are causal"
    q, kv = problem.query.dtype, problem.k_cache.dtype
    if kv == E4M3 and q != E4M3 and (q, problem.out_dtype) != (torch.bfloat16, torch.bfloat16):
        return f"trtllm-gen decode reads e4m3 K/V for e4m3 or, with bf16 output, bf16 queries, not for {q}"
    return _trtllm_gen("trtllm-gen decode", capability, problem)


def _trtllm_gen_context(capability: Capability | None, problem: PagedAttention) -> str | None:
    if problem.k_cache.dtype == E4M3 and problem.query.dtype != E4M3:
        return f"trtllm-gen context reads e4m3 K/V for e4m3 queries, not for {problem.query.dtype}"
    return _trtllm_gen("trtllm-gen context", capability, problem)


def _trtllm_gen(name: str, capability: Capability | None, problem: PagedAttention) -> str | None:
    """FlashInfer 0.7.2's checks, and SGLang 0.5.23's page sizes. Not run by the lab: no such GPU was at hand."""
    if capability is None or capability[0] != 10:
        return wrong_gpu(name, "SM100 and SM103", capability)
    q, kv = problem.query.dtype, problem.k_cache.dtype
    if q not in (*HALF_DTYPES, E4M3):
        return f"{name} takes fp16, bf16 or e4m3 queries, not {q}"
    if problem.out_dtype not in (q, *HALF_DTYPES):
        return f"{name} writes the query's dtype, fp16 or bf16, not {problem.out_dtype}"
    if kv == torch.uint8 and q != E4M3:
        return f"{name} reads NVFP4 K/V for e4m3 queries only, not for {q}"
    if problem.page_size not in (16, 32, 64, 128):
        return f"{name} is taken for page sizes 16, 32, 64 and 128, not {problem.page_size}"
    if problem.page_size >= 128 and problem.num_qo_heads == problem.num_kv_heads:
        return f"{name} at page size {problem.page_size} needs more than one query head per K/V head"
    if _strides_differ(problem.k_cache, problem.v_cache):
        return f"{name} reads V with K's strides, and they differ"
    for factors in (problem.k_scale_factors, problem.v_scale_factors):
        if factors is not None and factors.stride()[2:] != (factors.shape[3], 1):
            return f"{name} needs each head's scale factors contiguous in a page: lay them out as HND"
    return None


def _strides_differ(k: torch.Tensor | None, v: torch.Tensor | None) -> bool:
    return k is not None and v is not None and k.stride() != v.stride()


_RULES: dict[Kernel, Callable[[Capability | None, Any], str | None]] = {
    Kernel.PORTABLE: _portable,
    Kernel.PORTABLE_MLA: mla.portable_mla,
    Kernel.XQA: _xqa,
    Kernel.FMHA_V2: _fmha_v2,
    Kernel.TRTLLM_GEN_DECODE: _trtllm_gen_decode,
    Kernel.TRTLLM_GEN_CONTEXT: _trtllm_gen_context,
    Kernel.XQA_MLA: mla.xqa_mla,
    Kernel.TRTLLM_GEN_MLA: mla.trtllm_gen_mla,
    Kernel.FA2_MLA: mla.fa2_mla,
    Kernel.FA3_MLA: mla.fa3_mla,
    Kernel.PORTABLE_RAGGED: mla.portable_ragged,
    Kernel.TRTLLM_GEN_RAGGED: mla.trtllm_gen_ragged,
    Kernel.FA2_RAGGED: mla.fa2_ragged,
    Kernel.FA3_RAGGED: mla.fa3_ragged,
}
