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
from dataclasses import dataclass, fields

import torch

from lab.calls.arguments import span_of
from lab.calls.problem import E4M3
from lab.calls.selection import WINDOW_COLUMNS
from lab.dry_run.kernel_table import KernelFacts, MaskType, kernel_facts
from lab.dry_run.launches import KernelParams, Launch, LseArguments, TensorMap
from lab.references.quantization import deinterleave_v_scale_factors, dequantize_nvfp4
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


@dataclass(frozen=True)
class _Request:
    number: int  #: index in the batch
    first_row: int  #: index of the first query row
    num_rows: int  #: number of query rows
    computed: int  #: the launch's grid covers only this number of the first query rows
    kv_len: int  #: number of keys
    first_key: int  #: index of the first key in K and V, if they are not paged


def compute(launches: Iterable[Launch], memory: HostMemory) -> None:
    """Compute the output and the LSE of a call from its kernel launches, in order, and write them into the call's tensors.

    For a row that sees no key, no output is written: trtllm-gen writes nothing or NaN there (FlashInfer's pull request 4975 and
    issue 2883). The LSE of such a row is minus infinity in generation kernels (the same sources), and is not written by other
    kernels.

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
            maps = {each.member: each for each in launch.tma}
            by_head = bool(launch.params.use_block_sparse_attention)
            for kv_head in range(launch.params.num_heads_kv) if by_head else (None,):
                attention = _Attention(launch.params, kernel, maps, memory, kv_head)
                for request in _requests(launch.params, memory, kv_head or 0):
                    if request.computed > 0:
                        attention.run(request)


def _write_lse(arguments: LseArguments, memory: HostMemory) -> None:
    """Write the LSE of each row and head from two statistics: m, the largest logit, and d, the sum of exp(logit - m)."""
    shape = (arguments.n // arguments.num_heads_q, arguments.num_heads_q)
    stats = memory.array("the statistics of the softmax", arguments.md, (*shape, 2), torch.float32).double()
    strides_bytes = (4 * arguments.lse_stride_tokens, 4 * arguments.lse_stride_heads)
    lse = memory.view("the LSE", arguments.lse, shape, strides_bytes, torch.float32)
    lse.copy_(arguments.lse_scale * (LOG2_E * stats[..., 0] + torch.log2(stats[..., 1])))


def _refuse_unmodelled(params: KernelParams, kernel: KernelFacts) -> None:
    if kernel.mask is MaskType.CUSTOM or params.chunked_attention_size_log2:
        raise NotImplementedError(f"{kernel.name} has a custom or chunked mask, which no call of the lab's has")
    named = [(each.name, getattr(params, each.name)) for each in fields(params)]
    given = [
        name for name, value in (*named, *params.others) if name.startswith("ptr_") and value and name not in FOLLOWED
    ]
    if given:
        raise NotImplementedError(f"the launch of {kernel.name} has {', '.join(given)}, which is not modelled")


def _has_two_pools(params: KernelParams) -> bool:
    return bool(params.sparse_attn_top_k) and params.attention_window_size == WINDOW_COLUMNS


def _requests(params: KernelParams, memory: HostMemory, kv_head: int) -> list[_Request]:
    """Return the requests of a launch. `kv_head`: the K/V head whose lengths are read in block-sparse attention, else 0."""
    count = params.batch_size
    lengths = memory.array("seq_lens", params.ptr_seq_lens_kv, (kv_head + 1, count), torch.int32)[kv_head].tolist()
    if params.ptr_cum_seq_lens_q:
        offsets = memory.array("cum_seq_lens_q", params.ptr_cum_seq_lens_q, (count + 1,), torch.int32).tolist()
    else:
        offsets = [request * params.max_seq_len_q for request in range(count + 1)]
    first_keys = [0] * (count + 1)
    if params.ptr_cum_seq_lens_kv:
        first_keys = memory.array("cum_seq_lens_kv", params.ptr_cum_seq_lens_kv, (count + 1,), torch.int32).tolist()
    covered = params.max_num_ctas_q * params.num_tokens_per_cta_q
    requests = []
    for number, kv_len in enumerate(lengths):
        (first_row, end), (first_key, last_key) = offsets[number : number + 2], first_keys[number : number + 2]
        num_pages = -(-kv_len >> max(params.num_tokens_per_page_log2, 0))  # what a paged call may count instead
        if params.ptr_cum_seq_lens_kv and last_key - first_key not in (kv_len, num_pages):
            raise UnsoundLaunchError(
                f"request {number} has {kv_len} keys by seq_lens, and {last_key - first_key} by cum_seq_lens_kv: one is wrong"
            )
        # DeepSeek-V4's call bounds no length.
        most = kv_len if _has_two_pools(params) else params.max_seq_len_kv
        if not 0 <= kv_len <= most:
            raise UnsoundLaunchError(f"request {number} has {kv_len} keys, and the launch promises 0 to {most}")
        if not 0 <= first_row <= max(first_row, end) <= params.sum_of_seq_lens_q:
            raise UnsoundLaunchError(
                f"request {number} has the rows from {first_row} to {end} of {params.sum_of_seq_lens_q} query rows"
            )
        rows = end - first_row
        requests.append(_Request(number, first_row, rows, min(rows, covered), kv_len, first_key))
    return requests


class _Attention:
    """Compute the attention of one launch: for all heads, or for one K/V head and the query heads that use it."""

    def __init__(
        self,
        params: KernelParams,
        kernel: KernelFacts,
        maps: dict[str, TensorMap],
        memory: HostMemory,
        kv_head: int | None,
    ) -> None:
        self.params, self.kernel, self.maps, self.memory = params, kernel, maps, memory
        tokens, heads = params.sum_of_seq_lens_q, params.num_heads_q
        first, end = (0, params.num_heads_kv) if kv_head is None else (kv_head, kv_head + 1)
        group = heads // params.num_heads_kv
        self.kv_heads, of_rows = slice(first, end), slice(first * group, end * group)
        self.query = self._query()[:, of_rows].unflatten(1, (-1, group))
        out = memory.array("the output", params.ptr_o, (tokens, heads, kernel.head_dim_v), kernel.dtypes["O"])
        self.out = out[:, of_rows]
        self.stats = None
        if params.ptr_softmax_stats:
            stats = memory.array("the statistics", params.ptr_softmax_stats, (tokens, heads, 2), torch.float32)
            self.stats = stats[:, of_rows]
        self.sinks_log2 = None
        if params.ptr_attention_sinks:
            sinks = memory.array("the sinks", params.ptr_attention_sinks, (heads,), torch.float32)
            self.sinks_log2 = sinks[of_rows].double().view(-1, group) * LOG2_E
        self.scale_log2 = self._scale("bmm1_scale", params.ptr_scale_softmax_log2, params.scale_softmax_log2)
        self.out_scale = self._scale("bmm2_scale", params.ptr_output_scale, params.output_scale)

    def run(self, request: _Request) -> None:
        positions = request.kv_len - request.num_rows + torch.arange(request.computed)
        sees_all_keys = self.kernel.is_context and self.kernel.mask is MaskType.DENSE
        ends = torch.full_like(positions, request.kv_len) if sees_all_keys else positions + 1
        starts = torch.zeros_like(positions)
        if self.kernel.mask is MaskType.SLIDING_OR_CHUNKED_CAUSAL:
            starts = (ends - self.params.attention_window_size).clamp(min=0)
        if self.stats is not None and not self.kernel.is_context:
            self.stats[request.first_row :][: request.computed] = 0.0  # the LSE of these statistics is minus infinity
        if self.kernel.is_sparse:
            for row, position in enumerate(positions.tolist(), request.first_row):
                if len(entries := self._selected(row, position)):
                    values = entries[..., : self.kernel.head_dim_v]
                    self._attend(torch.tensor([row]), entries, values, torch.zeros(1, len(entries), dtype=torch.bool))
            return
        rows = (starts < ends).nonzero().flatten()
        if not len(rows):
            return
        first, end = int(starts[rows].min()), int(ends[rows].max())
        keys, values = (self._tokens(side, request, first, end) for side in "KV")
        at = torch.arange(first, end)
        hidden = (at < starts[rows].unsqueeze(1)) | (at >= ends[rows].unsqueeze(1))
        self._attend(request.first_row + rows, keys, values, hidden)

    def _attend(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor) -> None:
        """Write the output of query rows. `hidden`, bool [rows, keys], is True where a row does not see a key."""
        logits = torch.einsum("rhgd,khd->rhgk", self.query[rows].double(), keys) * self.scale_log2
        logits.masked_fill_(hidden[:, None, None, :], -math.inf)
        largest = logits.amax(-1)
        weights = torch.exp2(logits - largest.unsqueeze(-1))
        total = weights.sum(-1)
        if self.sinks_log2 is not None:
            total = total + torch.exp2(self.sinks_log2 - largest)
        result = torch.einsum("rhgk,khd->rhgd", weights, values) / total.unsqueeze(-1) * self.out_scale
        self.out[rows] = rounded(result.flatten(1, 2), self.kernel.dtypes["O"])
        if self.stats is not None:
            self.stats[rows] = torch.stack((largest / LOG2_E, total), -1).flatten(1, 2).float()

    def _query(self) -> torch.Tensor:
        """Return the query [num_rows, num_qo_heads, head_dim]. The heads are two dimensions of its TMA descriptor."""
        tensor_map, dtype = self.maps["tmaQ_"], self.kernel.dtypes["Q"]
        dims, strides_bytes = tensor_map.dims[::-1], (*reversed(tensor_map.strides_bytes), dtype.itemsize)
        return self.memory.view("the query's descriptor", tensor_map.address, dims, strides_bytes, dtype).flatten(1, 2)

    def _scale(self, what: str, pointer: int, number: float) -> float:
        given = self.memory.array(what, pointer, (1,), torch.float32) if pointer else torch.tensor(number)
        return float(given.float())

    def _tokens(self, side: str, request: _Request, first: int, end: int) -> torch.Tensor:
        """Return K or V (`side`) of a request for the keys first ... end - 1, float64 [keys, num_kv_heads, head_dim]."""
        head_dim = self.kernel.head_dim_qk if side == "K" else self.kernel.head_dim_v
        if not self.kernel.is_paged:
            return self._unpaged(side, request.first_key + first, end - first)[..., :head_dim]
        page_size = 1 << self.params.num_tokens_per_page_log2
        first_page = first // page_size
        ids = self._page_ids(side, request.number)[first_page : -(-end // page_size)]
        tokens = self._pages(side, ids.long(), page_size)
        return tokens[first - first_page * page_size : end - first_page * page_size, self.kv_heads, :head_dim]

    def _selected(self, row: int, position: int) -> torch.Tensor:
        """Return the cache entries that a row of sparse MLA at `position` selects, float64 [entries, 1, K's head_dim]."""
        shape = self.params.sum_of_seq_lens_q, self.params.max_num_pages_per_seq_kv
        if self.params.sparse_attn_top_k != shape[1] or self.maps["tmaV_"].address != self.maps["tmaK_"].address:
            raise UnsoundLaunchError("a row of the table has another number of places than top_k, or V is not K's part")
        used = position + 1
        if (lens := self.params.ptr_sparse_mla_top_k_lens) or 0:
            used = int(self.memory.array("the numbers of entries", lens, shape[:1], torch.int32)[row])
        indices = self.memory.array("the selected entries", self.params.ptr_page_idx_kv, shape, torch.int32)[row, :used]
        if not _has_two_pools(self.params):
            return self._entries("tmaK_", indices)
        of_window = self._entries("tmaKSlidingWindowKvPool_", indices[: min(position + 1, WINDOW_COLUMNS)])
        return torch.cat((of_window, self._entries("tmaK_", indices[WINDOW_COLUMNS:])))

    def _entries(self, descriptor: str, indices: torch.Tensor) -> torch.Tensor:
        """Return the pool's entries at `indices`, but none for an index of -1, float64 [entries, 1, K's head_dim]."""
        tensor_map, dtype = self.maps[descriptor], self.kernel.dtypes["K"]
        indices = indices[indices >= 0].long()
        if not len(indices):
            return torch.empty(0, 1, tensor_map.dims[0], dtype=torch.float64)
        (row_bytes,) = tensor_map.strides_bytes
        return self._blocks(
            "K's entries", tensor_map, indices, (1, tensor_map.dims[0]), (row_bytes, row_bytes), dtype
        ).double()

    def _blocks(
        self,
        what: str,
        tensor_map: TensorMap,
        indices: torch.Tensor,
        block_shape: tuple[int, ...],
        strides_bytes: tuple[int, ...],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the blocks, such as pages, at `indices`. Block i begins i * strides_bytes[0] bytes after the first."""
        least, most = int(indices.min()), int(indices.max())
        address = tensor_map.address + least * strides_bytes[0]
        shape, strides_bytes = (most - least + 1, *block_shape), (*strides_bytes, dtype.itemsize)
        return self.memory.view(f"{what} {least} to {most}", address, shape, strides_bytes, dtype)[indices - least]

    def _page_ids(self, side: str, request: int) -> torch.Tensor:
        width, address = self.params.max_num_pages_per_seq_kv, self.params.ptr_page_idx_kv
        if self.params.use_block_sparse_attention:
            shape = (self.params.num_heads_kv, self.params.batch_size, width)
            return self.memory.array("the page tables", address, shape, torch.int32)[self.kv_heads.start, request]
        if self.params.uses_shared_paged_kv_idx is not False:
            return self.memory.array("the page table", address, (self.params.batch_size, width), torch.int32)[request]
        tables = self.memory.array("the page tables", address, (self.params.batch_size, 2, width), torch.int32)
        return tables[request, "KV".index(side)]

    def _unpaged(self, side: str, first: int, count: int) -> torch.Tensor:
        """Return tokens `first` to `first + count - 1` of unpaged K or V (`side`), float64 [count, num_kv_heads, head_dim]."""
        tensor_map = self.maps[f"tma{side}_"]  # dims: (head_dim, tokens, heads, 1)
        if first + count > tensor_map.dims[1]:
            raise UnsoundLaunchError(
                f"{side}'s rows end at {first + count}, and its descriptor has {tensor_map.dims[1]}"
            )
        (token_bytes, head_bytes, *_), dtype = tensor_map.strides_bytes, self.kernel.dtypes[side]
        shape = (count, tensor_map.dims[2], tensor_map.dims[0])
        address = tensor_map.address + first * token_bytes
        return self.memory.view(
            f"{side}'s descriptor", address, shape, (token_bytes, head_bytes, dtype.itemsize), dtype
        ).double()

    def _pages(self, side: str, ids: torch.Tensor, page_size: int) -> torch.Tensor:
        """Return all tokens of the pages `ids` of K or V (`side`), float64 [len(ids) * page_size, num_kv_heads, head_dim]."""
        stored = self._stored(side, f"tma{side}_", ids, page_size, self.kernel.dtypes[side])
        if self.kernel.dtypes[side] != torch.uint8:
            tokens = stored.double()
        else:
            factors = self._stored(side, f"tma{side}Sf_", ids, page_size, E4M3)
            tokens = dequantize_nvfp4(stored, deinterleave_v_scale_factors(factors) if side == "V" else factors)
        return tokens.transpose(1, 2).flatten(0, 1)

    def _stored(
        self, side: str, descriptor: str, ids: torch.Tensor, page_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the pages `ids` as stored (NVFP4: two elements per byte), [len(ids), num_kv_heads, page_size, elements]."""
        # The descriptor may join r adjacent tokens into one row: (elements of a token * r, page_size / r, heads, pages).
        tensor_map = self.maps[descriptor]
        row_elements, rows, heads, pages = tensor_map.dims
        if tensor_map.dtype.startswith("16u4"):  # the descriptor counts NVFP4 elements, two per byte
            row_elements //= 2
        if len(wrong := ids[(ids < 0) | (ids >= pages)]):
            raise UnsoundLaunchError(
                f"the page table names page {int(wrong[0])} of {side}, whose descriptor has {pages} pages"
            )
        strides_bytes = tensor_map.strides_bytes[::-1]
        stored = self._blocks(f"{side}'s pages", tensor_map, ids, (heads, rows, row_elements), strides_bytes, dtype)
        return stored.reshape(len(ids), heads, page_size, -1)
