"""Compute attention on the CPU from a recorded launch of a trtllm-gen kernel: from its `KernelParams`, its TMA descriptors and
the memory to which they point.

`compute` follows the comments and the code of FlashInfer's launcher, and computes in float64. So a wrong stride, offset,
length, table, window or scale of the call gives a wrong output. NVIDIA's machine code does not run: its bugs, rounding and
times are not found, and neither is a read of keys that no row sees.

Sources of the rules (FlashInfer 0.7.2): `kernelParams.h` for descriptors and members; `fmhaReduction.cu` for the layout of the
output and of the softmax's statistics, the sinks, the position of a row and the scales; `fmhaKernels.cuh` for masks and the
rows that a grid covers; `lse.cuh` for the LSE. Every generation kernel is causal, even if its name says dense: the launcher's
comments say so.
"""

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from lab.calls import Problem
from lab.calls.arguments import span_of
from lab.calls.dsv4_decode import TwoPools
from lab.calls.problem import E4M3, AttentionCall, PagedAttention
from lab.calls.ragged_context import RaggedAttention
from lab.calls.selection import WINDOW_COLUMNS, columns_in_use
from lab.dry_run.kernel_table import KernelFacts, MaskType, kernel_facts
from lab.dry_run.launches import KernelParams, Launch, LseArguments, TensorMap
from lab.references.paged_attention import paged_attention
from lab.references.ragged_attention import ragged_attention
from lab.references.softmax_attention import rounded

LOG2_E = math.log2(math.e)
# Pointers of `KernelParams` that the arithmetic follows. All other pointers must be null.
FOLLOWED = frozenset(
    f"ptr_{name}"
    for name in (
        *("o", "attention_sinks", "cum_seq_lens_q", "cum_seq_lens_kv", "page_idx_kv", "seq_lens_kv", "softmax_stats"),
        *("scale_softmax_log2", "output_scale", "sparse_mla_top_k_lens"),
        *("multi_ctas_kv_counter", "partial_stats", "partial_o"),  # scratch, which does not change results
    )
)


class UnsoundLaunchError(RuntimeError):
    """A kernel launch accesses bytes outside of the tensors of its call, or has two arguments that contradict each other."""


@dataclass(frozen=True)
class HostMemory:
    """The memory that a kernel launch may access: the address ranges of the CPU tensors of its call."""

    spans: tuple[tuple[int, int], ...]  #: of each tensor, as `span_of` returns it

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> "HostMemory":
        """Return the address ranges of CPU tensors. The tensors must stay alive while their memory is viewed."""
        return cls(tuple(span_of(tensor) for tensor in tensors if tensor.numel()))

    def view(
        self, what: str, address: int, shape: Sequence[int], strides_bytes: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the memory at an address as a tensor, without copying. `what` names the memory in errors. Raises
        UnsoundLaunchError if the memory is not inside one of the call's tensors, or if the address or a stride is not a whole
        number of elements.
        """
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype)
        offset = sum((size - 1) * stride for size, stride in zip(shape, strides_bytes, strict=True))
        end = address + offset + dtype.itemsize
        if not any(first <= address and end <= last for first, last in self.spans):
            raise UnsoundLaunchError(
                f"{what} reaches {end - address} bytes from {address:#x} on, and no tensor of the call holds all of them"
            )
        if any(stride % dtype.itemsize for stride in strides_bytes) or address % dtype.itemsize:
            raise UnsoundLaunchError(
                f"{what} has strides of {tuple(strides_bytes)} bytes from {address:#x}: no whole {dtype}"
            )
        memory = (ctypes.c_uint8 * (end - address)).from_address(address)
        elements = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
        return elements.as_strided(tuple(shape), tuple(stride // dtype.itemsize for stride in strides_bytes))

    def array(self, what: str, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the memory at an address as a contiguous tensor, without copying. Raises UnsoundLaunchError like `view`."""
        strides = torch.empty(tuple(shape), device="meta").stride()
        return self.view(what, address, shape, [stride * dtype.itemsize for stride in strides], dtype)


def compute(launches: Iterable[Launch], memory: HostMemory) -> None:
    """Compute the output and the LSE of a call from its kernel launches, in order, and write them into the call's tensors.

    For a row that sees no key, `compute` writes no output; trtllm-gen writes nothing or NaN there. The LSE of such a row is
    minus infinity in generation kernels, and is not written by other kernels. FlashInfer's pull request 4975 and issue 2883
    describe what trtllm-gen writes.

    Raises:
        UnsoundLaunchError: a launch accesses memory outside the call's tensors, or two of its arguments contradict each other.
        NotImplementedError: a launch uses a feature that `compute` does not support.
        KeyError: the kernel table has no kernel with the launch's name.
    """
    for launch in launches:
        if "RemapDsv4SparseMlaIndices" in launch.name:
            raise NotImplementedError(
                "places in pools whose pages have gaps are changed on the GPU, which is not modelled"
            )
        if launch.lse is not None:
            _write_lse(launch.lse, memory)
        elif launch.params is not None and launch.name.startswith("fmhaSm"):
            kernel = kernel_facts(launch.name)
            _refuse_unmodelled(launch.params, kernel)
            _Attention(launch.params, kernel, {each.member: each for each in launch.tma}, memory).run()


def _write_lse(arguments: LseArguments, memory: HostMemory) -> None:
    """Write the LSE of each row and head from two statistics: m, the largest logit, and d, the sum of exp(logit - m)."""
    shape = (arguments.n // arguments.num_heads_q, arguments.num_heads_q)
    stats = memory.array("the statistics of the softmax", arguments.md, (*shape, 2), torch.float32).double()
    strides_bytes = (4 * arguments.lse_stride_tokens, 4 * arguments.lse_stride_heads)
    lse = memory.view("the LSE", arguments.lse, shape, strides_bytes, torch.float32)
    lse.copy_(arguments.lse_scale * (LOG2_E * stats[..., 0] + torch.log2(stats[..., 1])))


def _attention_of(problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    return ragged_attention(problem) if isinstance(problem, RaggedAttention) else paged_attention(problem)


def _refuse_unmodelled(params: KernelParams, kernel: KernelFacts) -> None:
    if kernel.mask is MaskType.CUSTOM or params.chunked_attention_size_log2:
        raise NotImplementedError(f"{kernel.name} has a custom or chunked mask, which no call of the lab's has")
    named = [(each.name, getattr(params, each.name)) for each in fields(params)]
    given = [
        name for name, value in (*named, *params.others) if name.startswith("ptr_") and value and name not in FOLLOWED
    ]
    if given:
        raise NotImplementedError(f"the launch of {kernel.name} has {', '.join(given)}, which is not modelled")


@dataclass(frozen=True)
class _Attention:
    """The attention of one launch."""

    params: KernelParams
    kernel: KernelFacts
    maps: dict[str, TensorMap]  #: the TMA descriptors by name
    memory: HostMemory

    def run(self) -> None:
        params, kernel, shape = self.params, self.kernel, (self.params.sum_of_seq_lens_q, self.params.num_heads_q)
        try:
            problem = self._problem()
            problem.check_values()
        except ValueError as error:
            raise UnsoundLaunchError(str(error)) from error
        covered = params.max_num_ctas_q * params.num_tokens_per_cta_q  # rows of a request
        if (longest := max(problem.q_lens(), default=0)) > covered:
            raise UnsoundLaunchError(f"a request has {longest} query rows, and the grid covers {covered}")
        result, lse_log2 = _attention_of(replace(problem, sinks=None))
        assert lse_log2 is not None
        is_written = lse_log2 != -math.inf  # the rows that see a key
        if problem.sinks is not None:
            result, _ = _attention_of(problem)  # also writes `lse_log2`, which is the problem's
        out = self.memory.array("the output", params.ptr_o, (*shape, kernel.head_dim_v), kernel.dtypes["O"])
        out[is_written] = rounded(result[is_written], kernel.dtypes["O"])
        if params.ptr_softmax_stats:
            stats = self.memory.array("the statistics", params.ptr_softmax_stats, (*shape, 2), torch.float32)
            if not kernel.is_context:
                stats.zero_()  # the LSE of these statistics is minus infinity
            lse = lse_log2[is_written] / LOG2_E
            stats[is_written] = torch.stack((lse, torch.ones_like(lse)), -1).float()  # the same LSE as of m and d

    def _problem(self) -> Problem:
        """Return the attention problem that the launch's arguments define. Its tensors are views of the call's memory."""
        params, kernel, array = self.params, self.kernel, self.memory.array
        batch, tokens, heads = params.batch_size, params.sum_of_seq_lens_q, params.num_heads_q
        if not params.ptr_cum_seq_lens_q and tokens != batch * params.max_seq_len_q:
            raise UnsoundLaunchError(f"{batch} requests of {params.max_seq_len_q} rows are not {tokens} query rows")

        def offsets(name: str, pointer: int) -> torch.Tensor | None:
            return array(name, pointer, (batch + 1,), torch.int32) if pointer else None

        by_head = bool(params.use_block_sparse_attention)
        has_window = kernel.mask is MaskType.SLIDING_OR_CHUNKED_CAUSAL
        sinks = params.ptr_attention_sinks
        given: dict[str, Any] = {
            "call": AttentionCall.CONTEXT if kernel.is_context else AttentionCall.DECODE,
            "query": self._query(),
            "seq_lens": array("seq_lens", params.ptr_seq_lens_kv, self._by_head(batch), torch.int32),
            "cu_seqlens_q": offsets("cum_seq_lens_q", params.ptr_cum_seq_lens_q),
            "cu_seqlens_kv": offsets("cum_seq_lens_kv", params.ptr_cum_seq_lens_kv),
            "max_q_len": params.max_seq_len_q,
            # DeepSeek-V4's call bounds no length.
            "max_kv_len": torch.iinfo(torch.int32).max if self._has_two_pools else params.max_seq_len_kv,
            "causal": not kernel.is_context or kernel.mask is not MaskType.DENSE,
            "window_left": params.attention_window_size - 1 if has_window else -1,
            "bmm1_scale": self._scale("bmm1_scale", params.ptr_scale_softmax_log2, params.scale_softmax_log2) / LOG2_E,
            "bmm2_scale": self._scale("bmm2_scale", params.ptr_output_scale, params.output_scale),
            "sinks": array("the sinks", sinks, (heads,), torch.float32) if sinks else None,
            "out": None,
            "out_dtype": torch.float64,
            "lse": torch.empty(tokens, heads, dtype=torch.float64),
            "return_lse": True,
        }
        if not kernel.is_paged:
            return RaggedAttention(**given, key=self._unpaged("K"), value=self._unpaged("V"))
        if kernel.is_sparse:
            return self._selecting(given)
        shared, width = params.uses_shared_paged_kv_idx is not False or by_head, params.max_num_pages_per_seq_kv
        shape = (*self._by_head(batch), width) if shared else (batch, 2, width)
        tables = array("the page table", params.ptr_page_idx_kv, shape, torch.int32)
        k_tables, v_tables = (tables, tables) if shared else (tables[:, 0], tables[:, 1])
        pages = -(-given["seq_lens"].unsqueeze(-1) >> params.num_tokens_per_page_log2)
        ids = torch.stack((k_tables, v_tables)).masked_fill(torch.arange(width) >= pages, -1)
        count = int(ids.amax()) + 1 if ids.numel() else 0
        k, v = (self._pages(f"tma{side}_", kernel.dtypes[side], count) for side in "KV")
        if kernel.dtypes["K"] == torch.uint8:
            factors = (self._pages(f"tma{side}Sf_", E4M3, count) for side in "KV")
            given["k_scale_factors"], given["v_scale_factors"] = factors
            given["v_scale_factors_interleaved"] = True
        v = v[..., : kernel.head_dim_v // (2 if kernel.dtypes["V"] == torch.uint8 else 1)]  # in MLA a part of K
        return PagedAttention(**given, k_cache=k, v_cache=v, k_block_tables=k_tables, v_block_tables=v_tables)

    def _selecting(self, given: dict[str, Any]) -> PagedAttention:
        params, shape = self.params, (self.params.sum_of_seq_lens_q, self.params.max_num_pages_per_seq_kv)
        if params.sparse_attn_top_k != shape[1] or self.maps["tmaV_"].address != self.maps["tmaK_"].address:
            raise UnsoundLaunchError("a row of the table has another number of places than top_k, or V is not K's part")
        selected = self.memory.array("the selected entries", params.ptr_page_idx_kv, shape, torch.int32)
        lens, num_window = params.ptr_sparse_mla_top_k_lens, WINDOW_COLUMNS if self._has_two_pools else 0
        given |= {"selected": selected, "selected_lens": None}
        if lens:
            given["selected_lens"] = self.memory.array("the numbers of entries", lens, shape[:1], torch.int32)
        offsets = given["cu_seqlens_q"]
        rows = range(0, shape[0] + 1, params.max_seq_len_q) if offsets is None else offsets.tolist()
        in_use = columns_in_use(selected, given["selected_lens"], given["seq_lens"], [*rows], num_window)
        cells = torch.where(in_use, selected, -1)
        pool = self._entries("tmaK_", cells[:, num_window:])
        given |= {"k_cache": pool, "v_cache": pool[..., : self.kernel.head_dim_v]}
        given |= dict.fromkeys(
            ("k_block_tables", "v_block_tables"), torch.empty(params.batch_size, 0, dtype=torch.int32)
        )
        if not num_window:
            return PagedAttention(**given)
        return TwoPools(**given, window_cache=self._entries("tmaKSlidingWindowKvPool_", cells[:, :num_window]))

    @property
    def _has_two_pools(self) -> bool:
        return bool(self.params.sparse_attn_top_k) and self.params.attention_window_size == WINDOW_COLUMNS

    def _by_head(self, batch: int) -> tuple[int, ...]:
        return (self.params.num_heads_kv, batch) if self.params.use_block_sparse_attention else (batch,)

    def _scale(self, what: str, pointer: int, number: float) -> float:
        given = self.memory.array(what, pointer, (1,), torch.float32) if pointer else torch.tensor(number)
        return float(given.float())

    def _query(self) -> torch.Tensor:
        """Return the query [num_rows, num_qo_heads, head_dim]. Its TMA descriptor has two dimensions for num_qo_heads."""
        return self._view("tmaQ_", self.kernel.dtypes["Q"], self.maps["tmaQ_"].dims[::-1]).flatten(1, 2)

    def _view(self, descriptor: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        tensor_map = self.maps[descriptor]
        strides_bytes = (*tensor_map.strides_bytes[::-1], dtype.itemsize)
        return self.memory.view(f"the descriptor {descriptor}", tensor_map.address, shape, strides_bytes, dtype)

    def _unpaged(self, side: str) -> torch.Tensor:
        """Return unpaged K or V (`side`), [num_tokens, num_kv_heads, head_dim]."""
        head_dim = self.kernel.head_dim_qk if side == "K" else self.kernel.head_dim_v
        width, tokens, heads, _ = self.maps[f"tma{side}_"].dims
        whole = self._view(f"tma{side}_", self.kernel.dtypes[side], (1, heads, tokens, width))
        return whole[0].transpose(0, 1)[..., :head_dim]

    def _pages(self, descriptor: str, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return pages 0 to count - 1 of a descriptor ("tmaK_"), [count, num_kv_heads, page_size, elements or NVFP4 bytes]."""
        # The descriptor may join r adjacent tokens into one row: (elements of a token * r, page_size / r, heads, pages).
        row_elements, rows, heads, pages = self.maps[descriptor].dims
        if count > pages:
            raise UnsoundLaunchError(f"the page table names page {count - 1}, and {descriptor} has {pages} pages")
        if self.maps[descriptor].dtype.startswith("16u4"):  # the descriptor counts NVFP4 elements, two per byte
            row_elements //= 2
        page_size = 1 << self.params.num_tokens_per_page_log2
        stored = self._view(descriptor, dtype, (count, heads, rows, row_elements))
        return stored.reshape(count, heads, page_size, row_elements * rows // page_size)

    def _entries(self, descriptor: str, cells: torch.Tensor) -> torch.Tensor:
        """Return a TMA descriptor's entries 0 to max(cells), each as a page of one token: [max(cells) + 1, 1, 1, head_dim]."""
        tensor_map, dtype = self.maps[descriptor], self.kernel.dtypes["K"]
        count = int(cells.amax()) + 1 if cells.numel() else 0
        shape, (row_bytes,) = (count, tensor_map.dims[0]), tensor_map.strides_bytes
        strides_bytes = (row_bytes, dtype.itemsize)
        return self.memory.view("K's entries", tensor_map.address, shape, strides_bytes, dtype)[:, None, None]
