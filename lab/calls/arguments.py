"""Check the arguments of FlashInfer's calls, one function per argument, before anything is launched.

The checks read shapes, dtypes, strides and host numbers, never a tensor's contents. A check raises TypeError or ValueError with
the name of the wrong argument. The parameter `call` is an object of a call class, such as `lab.calls.DecodeCall`.
"""

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lab.calls import allowed
from lab.calls.problem import E4M3, HALF_DTYPES, INTERLEAVED_TOKENS, NVFP4_BLOCK, Scale
from lab.gpus import capability_of, trtllm_backend_of

QUERY_DTYPES = (*HALF_DTYPES, E4M3, torch.float32, torch.float64)
OUT_DTYPES = QUERY_DTYPES
LENGTH_DTYPES = (torch.int32, torch.uint32)
RESULTS = ("out", "lse")


def check_tensor(name: str, value: object, dtypes: Sequence[torch.dtype] = ()) -> torch.Tensor:
    """Return `value` if it is a plain dense tensor with one of `dtypes` (empty: with any dtype). Else raise TypeError."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    # FakeTensor, DTensor and other such subclasses have no values in their memory.
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"{name} must be a plain torch.Tensor, got {type(value).__name__}")
    if value.is_nested or value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got a {'nested' if value.is_nested else value.layout} one")
    if dtypes and value.dtype not in dtypes:
        raise TypeError(f"{name} must be {dtype_names(dtypes)}, got {value.dtype}")
    return value


def check_int(name: str, value: object, least: int, remedy: str) -> int:
    """Return `value` as an int. Raise an error that ends with `remedy` unless it is an integer from `least` to 2**63 - 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {value!r}; {remedy}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}; {remedy}")
    if int(value) > torch.iinfo(torch.int64).max:
        raise ValueError(f"{name} must be an int64, got an int of {int(value).bit_length()} bits; {remedy}")
    return int(value)


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_vector(name: str, value: object, shape: int | Sequence[int], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    tensor, expected = check_tensor(name, value, dtypes), [shape] if isinstance(shape, int) else [*shape]
    if list(tensor.shape) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {tensor.stride()}; pass {name}.contiguous()")
    return tensor


def check_query(query: object, dtypes: Sequence[torch.dtype] = QUERY_DTYPES) -> None:
    tensor = check_tensor("query", query)
    if tensor.ndim != 3:
        raise ValueError(f"query must be [num_rows, num_qo_heads, head_dim], got shape {list(tensor.shape)}")
    if 0 in tensor.shape[1:]:
        raise ValueError(f"query needs at least one head and one element of head_dim, got shape {list(tensor.shape)}")
    check_tensor("query", tensor, dtypes)
    check_head_dim_stride("query", tensor)


def query_rows(call: Any, size_in_errors: str = "head_dim") -> torch.Tensor:
    """Check an MLA or DeepSeek-V4 query; return it as [rows, heads, head_dim]. `size_in_errors`: name of head_dim in errors."""
    query, is_ragged = check_tensor("query", call.query), call.cum_seq_lens_q is not None
    if query.ndim != (3 if is_ragged else 4):
        form = "num_rows" if is_ragged else "batch_size, q_len_per_request"
        raise ValueError(
            f"query must be [{form}, num_qo_heads, {size_in_errors}] {'with' if is_ragged else 'without'} cum_seq_lens_q, got "
            f"shape {list(query.shape)}"
        )
    if not is_ragged and query.shape[1] == 0:
        raise ValueError(f"query needs at least one row per request, got shape {list(query.shape)}")
    check_head_dim_stride("query", query)
    rows = query if is_ragged else query.flatten(0, 1)
    check_query(rows)
    return rows


def check_head_dim_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: head_dim must be contiguous (stride 1), got stride {tensor.stride(-1)}; call .contiguous() on it"
        )


def split_cache(name: str, cache: object, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views (K, V) of `cache`, the argument `name`: each [num_pages, num_kv_heads, page_size, last dimension]."""
    if kv_layout not in ("HND", "NHD"):
        raise ValueError(f"kv_layout must be 'HND' or 'NHD', got {kv_layout!r}")
    if isinstance(cache, torch.Tensor):
        if check_tensor(name, cache).ndim != 5 or cache.shape[1] not in (1, 2):
            raise ValueError(
                f"{name} as one tensor must be 5-D with 1 or 2 as its second dimension, got shape {list(cache.shape)}"
            )
        k, v = cache[:, 0], cache[:, -1]
    elif isinstance(cache, tuple) and len(cache) == 2:
        k, v = (check_tensor(f"{name}[{i}]", part) for i, part in enumerate(cache))
        if k.ndim != 4 or v.ndim != 4:
            raise ValueError(
                f"{name} as (K, V) must be two 4-D tensors, got shapes {list(k.shape)} and {list(v.shape)}"
            )
    else:
        raise TypeError(f"{name} must be a tensor or a pair of tensors (K, V), got {type(cache).__name__}")
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"{name}: K and V must agree, got {list(k.shape)} {k.dtype} and {list(v.shape)} {v.dtype}")
    check_head_dim_stride(f"K of {name}", k)
    check_head_dim_stride(f"V of {name}", v)
    return (k, v) if kv_layout == "HND" else (k.transpose(1, 2), v.transpose(1, 2))


def check_cache(query: torch.Tensor, k_cache: torch.Tensor) -> None:
    allowed = tuple(dict.fromkeys((query.dtype, E4M3, torch.uint8)))
    if k_cache.dtype not in allowed:
        raise TypeError(f"kv_cache must be {dtype_names(allowed)} for a {query.dtype} query, got {k_cache.dtype}")
    if k_cache.dtype == torch.uint8 and query.shape[2] % NVFP4_BLOCK:
        raise ValueError(
            f"query has head_dim {query.shape[2]}, but an NVFP4 (uint8) kv_cache needs a multiple of {NVFP4_BLOCK}"
        )
    stored = query.shape[2] // 2 if k_cache.dtype == torch.uint8 else query.shape[2]
    if k_cache.shape[3] != stored:
        raise ValueError(
            f"kv_cache has head_dim {k_cache.shape[3]}, but a query of head_dim {query.shape[2]} needs {stored}"
        )
    heads, page_size = k_cache.shape[1], k_cache.shape[2]
    if heads == 0 or query.shape[1] % heads:
        raise ValueError(
            f"the {query.shape[1]} heads of query do not divide evenly over the {heads} heads of kv_cache "
            "(is kv_layout right?)"
        )
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"kv_cache has page_size {page_size}; it must be a power of two (is kv_layout right?)")


def check_scale_factors(call: Any, k_cache: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return NVFP4 scale factors of K and V, e4m3 [num_pages, num_kv_heads, page_size, head_dim // 16]; None without NVFP4."""
    if k_cache.dtype != torch.uint8:
        if call.kv_cache_sf is not None:
            raise ValueError(f"kv_cache_sf goes with an NVFP4 (uint8) kv_cache, but kv_cache is {k_cache.dtype}")
        return None, None
    if call.kv_cache_sf is None:
        raise ValueError("kv_cache is uint8 (NVFP4): pass its scale factors as kv_cache_sf")
    k, v = split_cache("kv_cache_sf", call.kv_cache_sf, call.kv_layout)
    expected = (*k_cache.shape[:3], call.query.shape[2] // NVFP4_BLOCK)
    if k.shape != expected:
        raise ValueError(f"kv_cache_sf must be {list(expected)} as HND, got {list(k.shape)}")
    check_tensor("kv_cache_sf", k, (E4M3,))
    if has_interleaved_v_scales(call) and k_cache.shape[2] % INTERLEAVED_TOKENS:
        raise ValueError(
            f"kv_cache has page_size {k_cache.shape[2]}, but trtllm-gen interleaves V's scale factors over "
            f"{INTERLEAVED_TOKENS} tokens: use a larger page"
        )
    return k, v


def has_interleaved_v_scales(call: Any) -> bool:
    """Return True if the backend reads V's NVFP4 scale factors interleaved over 4 tokens: trtllm-gen does, XQA does not."""
    capability = capability_of(call.query.device)
    if call.backend == "auto" and capability is None:
        raise ValueError(
            "backend='auto' with an NVFP4 cache off the GPU: XQA and trtllm-gen order V's scale factors differently; "
            "pass backend='xqa' or 'trtllm-gen'"
        )
    return trtllm_backend_of(capability, call.backend) == "trtllm-gen"


def batch_size_of(block_tables: object, shared: bool, by_kv_head: bool = False) -> int:
    """Return the number of requests of a page table after checks. The table must be int32 [batch_size, columns], or
    [batch_size, 2, columns] if K and V have separate page ids (`shared` is False). If each K/V head has pages of its own
    (`by_kv_head`), the table must be contiguous [num_kv_heads, batch_size, columns].
    """
    check_bool("uses_shared_paged_kv_idx", shared)
    check_bool("enable_block_sparse_attention", by_kv_head)
    tensor = check_tensor("block_tables", block_tables, (torch.int32,))
    if by_kv_head:
        form, why = "[num_kv_heads, batch_size, max_num_pages_per_seq]", "enable_block_sparse_attention=True"
    else:
        form = "[batch_size, max_num_pages_per_seq]" if shared else "[batch_size, 2, max_num_pages_per_seq]"
        why = f"uses_shared_paged_kv_idx={shared}"
    if tensor.ndim != form.count(",") + 1 or (not shared and tensor.shape[1] != 2):
        raise ValueError(f"block_tables must be {form} with {why}, got shape {list(tensor.shape)}")
    if by_kv_head and not tensor.is_contiguous():
        raise ValueError(f"block_tables must be contiguous with {why}, got stride {tensor.stride()}")
    check_table_rows(tensor)
    return tensor.shape[1 if by_kv_head else 0]


def check_table_rows(block_tables: torch.Tensor) -> None:
    if block_tables.shape[-1] > 1 and block_tables.stride(-1) != 1:
        raise ValueError("block_tables rows must be contiguous; pass block_tables.contiguous()")


def check_max_q_len(call: Any) -> int:
    if call.cum_seq_lens_q is None:
        if call.max_q_len is not None:
            raise ValueError(f"max_q_len={call.max_q_len} needs cum_seq_lens_q; for equal widths pass q_len_per_req")
        return check_int("q_len_per_req", call.q_len_per_req, 1, "or pass cum_seq_lens_q and max_q_len")
    if call.q_len_per_req is not None:
        raise ValueError(
            f"q_len_per_req={call.q_len_per_req} contradicts cum_seq_lens_q (FlashInfer 0.7.2 derives the batch "
            "from q_len_per_req and its default is 1): pass q_len_per_req=None"
        )
    return check_int("max_q_len", call.max_q_len, 0, "it goes with cum_seq_lens_q")


def check_scale(name: str, scale: object) -> Scale:
    """Return `scale` if it is a float32 tensor of one element, or a finite number (as a float). Otherwise raise an error."""
    if isinstance(scale, torch.Tensor):
        if check_tensor(name, scale).dtype != torch.float32 or scale.numel() != 1:
            raise TypeError(
                f"{name} as a tensor must be float32 with one element, got {scale.dtype} {list(scale.shape)}"
            )
        return scale
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"{name} must be a number or a float32 tensor of one element, got {scale!r}")
    if not math.isfinite(scale):
        raise ValueError(f"{name} must be finite, got {scale}")
    return float(scale)


def check_skip_softmax(factor: object) -> float:
    name = "skip_softmax_threshold_scale_factor"
    if factor is None:
        return 0.0
    if isinstance(factor, torch.Tensor):
        raise TypeError(f"{name} must be a number or None, got a tensor")
    scale = check_scale(name, factor)
    if scale < 0:
        raise ValueError(f"{name} must be at least 0, got {factor}; None and 0 skip nothing")
    return float(scale)


def check_o_scale(o_scale: object, out_dtype: torch.dtype) -> None:
    if o_scale is None:
        return
    scale = check_scale("o_scale", o_scale)
    if isinstance(scale, torch.Tensor) or scale == 0:
        raise ValueError("o_scale must be a number other than 0, by which XQA divides: fold a tensor into bmm2_scale")
    if scale != 1 and out_dtype != E4M3:
        raise ValueError(
            f"o_scale={scale} goes with an e4m3 output, not {out_dtype}: FlashInfer 0.7.2's XQA multiplies other outputs by "
            "it, or their logits, and trtllm-gen ignores it; fold it into bmm2_scale"
        )


def common_fields(call: Any, sinks: object, name: str = "sinks") -> dict[str, Any]:
    """Check the scales, the sinks (argument `name`) and the skip-softmax threshold of a call. Return the fields of the call's
    attention problem that all call types share: field name, such as "bmm1_scale" -> value.
    """
    if (bmm1_scale_log2 := getattr(call, "bmm1_scale_log2", None)) is not None:
        check_scale("bmm1_scale_log2", check_tensor("bmm1_scale_log2", bmm1_scale_log2))
    if sinks is not None:
        check_vector(name, sinks, call.query.shape[-2], (torch.float32,))
    return {
        "call": call.function,
        "seq_lens": call.seq_lens,
        "cu_seqlens_q": call.cum_seq_lens_q,
        "sinks": sinks,
        "bmm1_scale": check_scale("bmm1_scale", call.bmm1_scale)
        if bmm1_scale_log2 is None
        else bmm1_scale_log2.to(torch.float64) * math.log(2.0),  # a product in float32 would be rounded
        "bmm2_scale": check_scale("bmm2_scale", call.bmm2_scale),
        "skip_softmax": check_skip_softmax(getattr(call, "skip_softmax_threshold_scale_factor", None)),
    }


def following_scale(bmm1_scale_log2: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
    """Return a tensor to pass as `bmm1_scale`, and a function that sets this tensor to `bmm1_scale_log2 * log(2)`. Call the
    function before each run, because the contents of `bmm1_scale_log2` may change.
    """
    scale = torch.empty_like(bmm1_scale_log2)
    return scale, partial(torch.mul, bmm1_scale_log2, math.log(2.0), out=scale)


def check_out(out: object, expected: Sequence[int], words: str, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    tensor = check_tensor("out", out, dtypes)
    if tensor.shape != torch.Size(expected):
        raise ValueError(f"out must be {list(expected)}, {words}, got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"out must be contiguous, got stride {tensor.stride()}")
    if tensor.requires_grad:
        raise ValueError("out must not require grad, since it is written in place; pass out.detach()")
    return tensor


def latent_out(call: Any, size: int, words: str) -> dict[str, Any]:
    if call.out is None:
        return {"out": None, "out_dtype": torch.bfloat16}
    out = check_out(call.out, (*call.query.shape[:-1], size), words, OUT_DTYPES)
    return {"out": out.view(-1, *out.shape[-2:]), "out_dtype": out.dtype}


def output_dtype(call: Any) -> torch.dtype:
    """Return the dtype of the output: that of `out`, else `out_dtype`, else the query's dtype."""
    if call.out_dtype == "nvfp4":
        remedy = f"its scale factors have a type and an order of FlashInfer's own; use one of {dtype_names(OUT_DTYPES)}"
        allowed.not_modelled("out_dtype", "nvfp4", remedy)
    for name in ("o_sf_scale", "o_sf_vec_size"):
        if getattr(call, name) is not None:
            raise ValueError(
                f"{name}={getattr(call, name)!r} goes with out_dtype='nvfp4' (FlashInfer 0.7.2): pass None"
            )
    if call.out is not None:
        out = check_out(call.out, call.query.shape, "the query's shape", OUT_DTYPES)
        if call.out_dtype is not None and out.dtype != call.out_dtype:
            raise ValueError(f"out is {out.dtype} but out_dtype is {call.out_dtype}; drop one of them")
        return out.dtype
    dtype = call.query.dtype if call.out_dtype is None else call.out_dtype
    if not isinstance(dtype, torch.dtype) or dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype must be {dtype_names(OUT_DTYPES)}, got {dtype!r}")
    return dtype


def check_lse(call: Any) -> torch.Tensor | None:
    """Check and return the call's `lse`: None, or float32 [num_rows, num_qo_heads] whose elements do not share memory."""
    if call.lse is None:
        return None
    lse = check_tensor("lse", call.lse, (torch.float32,))
    if lse.shape != call.query.shape[:2]:
        raise ValueError(f"lse must be [num_rows, num_qo_heads] = {list(call.query.shape[:2])}, got {list(lse.shape)}")
    if may_overlap(lse.shape, lse.stride()):
        raise ValueError(f"lse has elements that share memory (stride {lse.stride()}); pass a contiguous tensor")
    return lse


def takes_rank(call: Any) -> bool:
    world = check_int("cp_world", call.cp_world, 1, "it counts the ranks of the group")
    rank = check_int("cp_rank", call.cp_rank, 0, "ranks are 0 to cp_world - 1")
    return (world, rank, call.causal_seqlens_kv_global) != (1, 0, None)


def check_devices(call: Any, on_host: Sequence[str] = ()) -> None:
    """Raise ValueError if a tensor is not on the query's device. Scratch memory and arguments in `on_host` may be elsewhere."""
    device = call.query.device
    anywhere = (*allowed.FREE_ARGUMENTS, *on_host)
    for name, value in vars(call).items():
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.device != device and name not in anywhere:
                raise ValueError(f"{name} is on {tensor.device}, but query is on {device}; move it there")


def may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if elements of a tensor of this shape may share memory, judged by its strides."""
    span = 1  # elements of the dimensions with smaller strides, with their gaps
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += max(size - 1, 0) * stride
    return False


def check_results_apart(call: Any) -> None:
    """Raise ValueError if the memory of `out` or `lse` overlaps the memory of another tensor of the call."""
    for result, name in overwritten(vars(call)):
        raise ValueError(
            f"{result} shares memory with {name}, which the call would overwrite, or lies between its elements; "
            "pass another tensor"
        )


def overwritten(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield ("out" or "lse", name of another argument) for each overlap in memory. Gaps between elements count as memory."""
    if all(given.get(name) is None for name in RESULTS):
        return
    spans = [
        (name, *span_of(tensor))
        for name, value in given.items()
        if name not in allowed.FREE_ARGUMENTS
        for tensor in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta
    ]
    for result, start, end in spans:
        for name, other_start, other_end in spans if result in RESULTS else ():
            if name != result and start < other_end and other_start < end:
                yield result, name


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (address of the first byte, address after the last byte) of a tensor, gaps between its elements included."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
