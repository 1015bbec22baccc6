"""Define the events that a dry run records: kernel launches with their arguments, memory fills and copies.

An address points into one of the call's tensors (`Tensor.data_ptr`). The address 0 stands for an absent tensor.
"""

import re
from dataclasses import dataclass, fields
from typing import Any

# CUtensorMapDataType and CUtensorMapSwizzle of cuda.h, by number.
TMA_DTYPES = (
    *("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16"),
    *("float32_ftz", "tfloat32", "tfloat32_ftz", "16u4_align8b", "16u4_align16b", "16u6_align16b"),
)
TMA_SWIZZLES = ("none", "32B", "64B", "128B", "128B_atom_32B", "128B_atom_32B_flip_8B", "128B_atom_64B")


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor in the arguments of a launch: address, shape and strides, as in cuda.h's `cuTensorMapEncodeTiled`."""

    member: str  #: the descriptor's name in `KernelParams`, such as `tmaK_`
    #: one of `TMA_DTYPES`. e4m3 is "uint8". NVFP4 is "uint8" too, two elements per byte, unless the kernel unpacks it.
    dtype: str
    address: int  #: address of the first element
    dims: tuple[int, ...]  #: size of each dimension in elements, the innermost first
    strides_bytes: tuple[int, ...]  #: stride of each dimension except the innermost, whose elements are adjacent
    box: tuple[int, ...]  #: elements of each dimension that one copy transfers
    swizzle: str  #: one of `TMA_SWIZZLES`


@dataclass(frozen=True)
class KernelParams:
    """The members of FlashInfer's struct `KernelParams` (kernelParams.h), in snake case without the prefix m.

    A member that the installed FlashInfer's struct does not have is None. `others` has (name, value) of each member without a
    field here.
    """

    sizeof: int  #: size of the struct in bytes
    ptr_o: int
    ptr_attention_sinks: int  #: float32 [num_heads_q]
    ptr_cum_seq_lens_q: int  #: int32 [batch_size + 1]
    ptr_cum_seq_lens_kv: int  #: int32 [batch_size + 1]
    #: scratch, like `ptr_partial_o` and `ptr_partial_stats`, for launches in which several CTAs share the keys of a request
    ptr_multi_ctas_kv_counter: int
    ptr_partial_o: int
    ptr_partial_stats: int
    ptr_output_scale: int  #: scale on the device, which replaces `output_scale`
    ptr_page_idx_kv: int  #: the page table, int32
    ptr_scale_softmax_log2: int  #: scale on the device, which replaces `scale_softmax_log2`
    ptr_seq_lens_kv: int  #: int32 [batch_size]
    ptr_softmax_stats: int  #: (max, sum) of each row and head, if the call returns the LSE
    ptr_sparse_mla_top_k_lens: int | None  #: int32 [rows], number of selected entries that each row uses
    attention_window_size: int  #: number of keys that a row sees, including its own
    batch_size: int
    chunked_attention_size_log2: int
    max_seq_len_q: int
    max_seq_len_kv: int
    max_num_ctas_q: int
    max_num_ctas_kv: int
    max_num_pages_per_seq_kv: int
    num_heads_kv: int
    num_heads_q: int
    num_heads_q_per_kv: int
    num_tokens_per_cta_q: int
    num_tokens_per_page_log2: int
    output_scale: float
    scale_softmax_log2: float  #: the factor of the logits, times log2(e)
    skip_softmax_threshold_scale_factor: float
    sparse_attn_top_k: int | None  #: number of columns in the table of selected entries; 0 if the table names pages
    sum_of_seq_lens_q: int
    sum_of_seq_lens_kv: int
    uses_shared_paged_kv_idx: bool | None
    use_block_sparse_attention: bool | None  #: the first dimension of page table and lengths counts K/V heads
    others: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class LseArguments:
    """The arguments of FlashInfer's kernel that computes the LSE from softmax statistics (lse.cuh). Strides count elements."""

    md: int  #: address of the statistics: (maximum, sum) of each row and head
    lse: int  #: address of the LSE
    num_heads_q: int
    lse_stride_tokens: int
    lse_scale: float
    lse_stride_heads: int
    n: int  #: number of rows times number of heads


@dataclass(frozen=True)
class Launch:
    """One recorded launch of a kernel: its name, its grid, and its arguments."""

    name: (
        str  #: name in the kernel table for a trtllm-gen kernel; C++ mangled name for a kernel that FlashInfer compiles
    )
    #: (x, y, z)
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: int  #: thread blocks per cluster, along x
    pdl: bool  #: the launch may begin before the previous one has ended (programmatic dependent launch)
    shared_memory_bytes: int  #: dynamic shared memory per thread block
    #: parameters of an attention kernel, or of the kernel that merges partial results; None for other kernels
    params: KernelParams | None
    tma: tuple[TensorMap, ...]  #: the TMA descriptors in the arguments, in order
    lse: LseArguments | None  #: arguments of the kernel that computes the LSE; None for other kernels


@dataclass(frozen=True)
class Fill:
    """A memset of `size_bytes` bytes at `address` to the byte `value`, made by the launcher or by FlashInfer's Python code."""

    address: int
    value: int
    size_bytes: int


@dataclass(frozen=True)
class CompiledCall:
    """A recorded call of a kernel that FlashInfer compiles for the call's shape, such as XQA. The kernel was not run."""

    backend: str  #: "xqa", "xqa_mla" or "fmha_v2"
    compiled_for: tuple[tuple[str, Any], ...]  #: (parameter, value) pairs for which FlashInfer compiles the kernel
    function: str  #: name of the function in the compiled module
    arguments: tuple[Any, ...]  #: arguments of the function, in order. Tensors are the call's own.


@dataclass(frozen=True)
class Copy:
    to: int
    source: int
    size_bytes: int


def events(log: list[dict[str, Any]]) -> tuple[Launch | Fill | Copy, ...]:
    """Convert the calls in the fake CUDA's log (`Launcher.log`) to launches, memsets and copies."""
    makers: dict[str, Any] = {"launch": _launch, "fill": Fill, "copy": Copy}
    return tuple(makers[each.pop("event")](**each) for each in map(dict, log))


def _launch(arguments: dict[str, Any] | None, grid: list[int], block: list[int], **named: Any) -> Launch:
    given = arguments or {}
    maps = tuple(_tensor_map(name, each) for name, each in given.items() if isinstance(each, dict))
    return Launch(
        **named,
        grid=(grid[0], grid[1], grid[2]),
        block=(block[0], block[1], block[2]),
        params=_params(given) if "sizeof" in given else None,
        tma=maps,
        lse=LseArguments(**given) if "md" in given else None,
    )


def _tensor_map(member: str, given: dict[str, Any]) -> TensorMap:
    listed = {name: tuple(given[name]) for name in ("dims", "strides_bytes", "box")}
    dtype, swizzle = TMA_DTYPES[given["dtype"]], TMA_SWIZZLES[given["swizzle"]]
    return TensorMap(member, dtype, given["address"], swizzle=swizzle, **listed)


def _params(given: dict[str, Any]) -> KernelParams:
    # FlashInfer's names in snake case: "mBatchSize" becomes "batch_size"
    word = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    members = {name: value for name, value in given.items() if not name.startswith("tma")}
    values = {re.sub(word, "_", re.sub(r"^m(?=[A-Z])", "", name)).lower(): value for name, value in members.items()}
    known = {each.name for each in fields(KernelParams)} - {"others"}
    others = tuple((name, value) for name, value in values.items() if name not in known)
    return KernelParams(**{name: values.get(name) for name in known}, others=others)  # type: ignore[arg-type]
