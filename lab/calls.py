"""FlashInfer's two TRT-LLM attention calls as data: their parameters, their checks, and the one problem both pose.

A leaf that references and kernels share. It needs torch alone and launches nothing: every check made here reads
shapes, dtypes, strides and host numbers. What a check would have to read from a device is in `check_values`.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch

NVFP4_BLOCK = 16  # elements of head_dim under one e4m3 scale factor (FlashInfer 0.7.2, kv_cache_sf)
INTERLEAVED_TOKENS = 4  # tokens whose V scale factors trtllm-gen stores together (nvfp4_quantize_paged_kv_cache)
MASK_BITS_PER_WORD = 16  # XQA's draft mask is uint16 words, two per 32 draft tokens

HALF_DTYPES = (torch.float16, torch.bfloat16)
FULL_DTYPES = (torch.float32, torch.float64)
QUERY_DTYPES = (*HALF_DTYPES, torch.float8_e4m3fn, *FULL_DTYPES)
OUT_DTYPES = QUERY_DTYPES
LENGTH_DTYPES = (torch.int32, torch.uint32)

# Scratch and a launch hint: they change no result, so any value will do, on any device.
FREE_ARGUMENTS = ("workspace_buffer", "enable_pdl", "multi_ctas_kv_counter_buffer")

Scale = float | torch.Tensor
KVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class PagedAttention:
    """One checked attention problem over a paged K/V cache, whichever of the two calls posed it.

    Attributes:
        query: [num_rows, num_qo_heads, head_dim].
        k_cache, v_cache: views [num_pages, num_kv_heads, page_size, head_dim] (head_dim // 2 bytes for NVFP4),
            whatever the layout they were given in.
        k_scale_factors, v_scale_factors: e4m3 views [num_pages, num_kv_heads, page_size, head_dim // 16], NVFP4 only.
        v_scale_factors_interleaved: True for TRT-LLM's 4-token interleaved order of `v_scale_factors`.
        k_block_tables, v_block_tables: int32 [batch_size, max_num_pages_per_seq]; the same tensor when shared.
        seq_lens: [batch_size], keys of each request, the query tokens' own included.
        cu_seqlens_q: int32 [batch_size + 1], or None when every request has `max_q_len` query rows.
        cu_seqlens_kv: int32 [batch_size + 1], running sum of `seq_lens`; None in a decode call.
        max_q_len: most query rows of one request.
        max_kv_len: most keys that the caller promises for one request.
        causal: row i of a request with q rows and L keys sits at position L - q + i and sees keys up to it.
        window_left: a row at position p sees keys p - window_left … p; -1 sees all.
        sinks: float32 [num_qo_heads], a logit per head added to the softmax's denominator; or None.
        mask: packed draft mask, uint16 [batch_size, q_len, 2 * ceil(q_len / 32)]; or None.
        bmm1_scale, bmm2_scale: factor of Q·K^T and of P·V.
        out, out_dtype, lse, return_lse: where the results go.
    """

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale_factors: torch.Tensor | None
    v_scale_factors: torch.Tensor | None
    v_scale_factors_interleaved: bool
    k_block_tables: torch.Tensor
    v_block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_kv: torch.Tensor | None
    max_q_len: int
    max_kv_len: int
    causal: bool
    window_left: int
    sinks: torch.Tensor | None
    mask: torch.Tensor | None
    bmm1_scale: Scale
    bmm2_scale: Scale
    out: torch.Tensor | None
    out_dtype: torch.dtype
    lse: torch.Tensor | None
    return_lse: bool

    @property
    def batch_size(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_rows(self) -> int:
        return self.query.shape[0]

    @property
    def num_qo_heads(self) -> int:
        return self.query.shape[1]

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[1]

    @property
    def page_size(self) -> int:
        return self.k_cache.shape[2]

    @property
    def is_nvfp4(self) -> bool:
        return self.k_cache.dtype == torch.uint8

    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What to fill: the output, and the LSE or None, given or new, as in `DecodeCall`."""
        out, lse = self.out, self.lse
        if out is None:
            out = torch.empty(self.query.shape, dtype=self.out_dtype, device=self.query.device)
        if lse is None and self.return_lse:
            lse = torch.empty(self.query.shape[:2], dtype=torch.float32, device=self.query.device)
        return out, lse

    def returned(self, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
        """What the call returns: `out`, or `(out, lse)` where `return_lse` asked for it."""
        return (out, lse) if self.return_lse else out


@dataclass(frozen=True, eq=False)
class DecodeCall:
    """The arguments of FlashInfer 0.7.2's `trtllm_batch_decode_with_kv_cache`: same names, order and defaults.

    Attributes:
        query: [num_rows, num_qo_heads, head_dim], fp16, bf16 or e4m3; row-major over requests, then their tokens.
        kv_cache: (K, V), each [num_pages, num_kv_heads, page_size, head_dim] ("HND") or
            [num_pages, page_size, num_kv_heads, head_dim] ("NHD"); or one tensor with a second dimension of 2 (K and V)
            or 1 (K is V). The query's dtype, e4m3, or uint8 for NVFP4.
        workspace_buffer: scratch of FlashInfer's kernels; what needs none ignores it.
        block_tables: int32 [batch_size, max_num_pages_per_seq], or [batch_size, 2, max_num_pages_per_seq] with separate
            K and V page ids when `uses_shared_paged_kv_idx` is False.
        seq_lens: int32 or uint32 [batch_size]: keys of each request, its query tokens included.
        max_seq_len: host bound of `seq_lens`; 0 for an empty batch.
        bmm1_scale, bmm2_scale: number, or float32 tensor of one element: factor of Q·K^T and of P·V.
        bmm1_scale_log2: float32 tensor of one element, `bmm1_scale * log2(e)`; takes precedence over `bmm1_scale`.
        window_left: keys to the left of a row that it sees; -1 for all.
        out, out_dtype: where, or as what, the output is written.
        sinks: float32 [num_qo_heads].
        q_len_per_req: query rows of every request; None with `cum_seq_lens_q`.
        max_q_len, cum_seq_lens_q: most rows of a request, and int32 [batch_size + 1] row offsets, as in `ContextCall`.
        mask: packed draft mask for q_len_per_req > 1, uint16 [batch_size, q_len, 2 * ceil(q_len / 32)]; bit b of word w
            of row j set: draft token 16 w + b is visible to row j. Without it the rows are causal.
        kv_cache_sf: (K, V) e4m3 scale factors of an NVFP4 cache, one per 16 elements of head_dim.
        lse, return_lse: float32 [num_rows, num_qo_heads], base 2: log2 of the softmax's denominator, the sink included.

    The other parameters have one value that the lab models, their default; another raises NotImplementedError. Those
    that change no result (`FREE_ARGUMENTS`) are free.
    """

    query: torch.Tensor
    kv_cache: KVCache
    workspace_buffer: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    bmm1_scale: Scale = 1.0
    bmm2_scale: Scale = 1.0
    window_left: int = -1
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | str | None = None
    o_sf_scale: float | None = None
    o_sf_vec_size: int | None = None
    sinks: torch.Tensor | None = None
    kv_layout: str = "HND"
    enable_pdl: bool | None = None
    backend: str = "auto"
    q_len_per_req: int | None = 1
    o_scale: float | None = 1.0
    mask: torch.Tensor | None = None
    max_q_len: int | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None
    uses_shared_paged_kv_idx: bool = True
    lse: torch.Tensor | None = None
    return_lse: bool = False
    bmm1_scale_log2: torch.Tensor | None = None
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None
    enable_block_sparse_attention: bool = False
    cp_world: int = 1
    cp_rank: int = 0
    causal_seqlens_kv_global: torch.Tensor | None = None
    bf16q_fp8kv_transform_mode: str | None = None
    request_order: torch.Tensor | None = None
    request_order_plan: Any = None

    def problem(self) -> PagedAttention:
        """Check the arguments and pose the problem.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: a shape, device, stride or number that no implementation can take.
            NotImplementedError: an argument that the lab does not model, away from its default.
        """
        _check_modelled(
            self,
            "o_sf_scale o_sf_vec_size skip_softmax_threshold_scale_factor enable_block_sparse_attention "
            "cp_world cp_rank causal_seqlens_kv_global bf16q_fp8kv_transform_mode request_order request_order_plan",
        )
        if isinstance(self.o_scale, torch.Tensor) or self.o_scale not in (None, 1.0):
            _not_modelled("o_scale", self.o_scale, "fold it into bmm2_scale")
        _check_backend(self.backend, ("auto", "xqa", "trtllm-gen"))
        batch_size = _batch_size(self.block_tables, self.uses_shared_paged_kv_idx)
        max_q_len = self._max_q_len()
        _check_query(self.query)
        if self.cum_seq_lens_q is None and self.query.shape[0] != batch_size * max_q_len:
            raise ValueError(
                f"query has {self.query.shape[0]} rows, but block_tables has {batch_size} requests of q_len_per_req="
                f"{max_q_len}: expected {batch_size * max_q_len} rows"
            )
        if self.mask is not None:
            _check_mask(self.mask, self.cum_seq_lens_q, batch_size, max_q_len)
        return _problem(
            self,
            max_q_len=max_q_len,
            max_kv_len=self.max_seq_len,
            causal=True,
            bmm1_scale=self.bmm1_scale if self.bmm1_scale_log2 is None else _from_log2(self.bmm1_scale_log2),
            cum_seq_lens_kv=None,
            mask=self.mask,
        )

    def _max_q_len(self) -> int:
        if self.cum_seq_lens_q is None:
            if self.max_q_len is not None:
                raise ValueError(
                    f"max_q_len={self.max_q_len} needs cum_seq_lens_q; for equal widths pass q_len_per_req"
                )
            return _check_int("q_len_per_req", self.q_len_per_req, 1, "or pass cum_seq_lens_q and max_q_len")
        if self.q_len_per_req is not None:
            raise ValueError(
                f"q_len_per_req={self.q_len_per_req} contradicts cum_seq_lens_q (FlashInfer 0.7.2 derives the batch "
                "from q_len_per_req and its default is 1): pass q_len_per_req=None"
            )
        return _check_int("max_q_len", self.max_q_len, 0, "it goes with cum_seq_lens_q")


@dataclass(frozen=True, eq=False)
class ContextCall:
    """The arguments of FlashInfer 0.7.2's `trtllm_batch_context_with_kv_cache`: same names, order and defaults.

    Attributes (others as in `DecodeCall`):
        max_q_len, max_kv_len: host bounds of the query and key lengths; 0 for an empty batch.
        cum_seq_lens_q, cum_seq_lens_kv: int32 [batch_size + 1] offsets of the query rows and of the keys.
        causal: False lets every row see every key of its request; it excludes a window.
    """

    query: torch.Tensor
    kv_cache: KVCache
    workspace_buffer: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_q_len: int
    max_kv_len: int
    bmm1_scale: Scale
    bmm2_scale: Scale
    batch_size: int
    cum_seq_lens_q: torch.Tensor
    cum_seq_lens_kv: torch.Tensor
    window_left: int = -1
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | str | None = None
    o_sf_scale: float | None = None
    o_sf_vec_size: int | None = None
    kv_layout: str = "HND"
    enable_pdl: bool | None = None
    sinks: torch.Tensor | None = None
    kv_cache_sf: KVCache | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    uses_shared_paged_kv_idx: bool = True
    causal: bool = True
    lse: torch.Tensor | None = None
    return_lse: bool = False
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None
    use_fp16_softmax: bool | None = None
    uses_spcompress: bool | None = None
    backend: str = "trtllm-gen"

    def problem(self) -> PagedAttention:
        """Check the arguments and pose the problem; raises as `DecodeCall.problem` does."""
        _check_modelled(
            self,
            "o_sf_scale o_sf_vec_size skip_softmax_threshold_scale_factor use_fp16_softmax uses_spcompress",
        )
        _check_backend(self.backend, ("trtllm-gen",))
        _check_query(self.query)
        if _batch_size(self.block_tables, self.uses_shared_paged_kv_idx) != self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} but block_tables has {self.block_tables.shape[0]} rows: "
                "one row per request is needed"
            )
        for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
            _check_tensor(name, getattr(self, name))
        _check_bool("causal", self.causal)
        if not self.causal and self.window_left >= 0:
            raise NotImplementedError(
                f"causal=False with window_left={self.window_left}: FlashInfer has no such kernel; pass window_left=-1"
            )
        return _problem(
            self,
            max_q_len=_check_int("max_q_len", self.max_q_len, 0, "it bounds the rows of one request"),
            max_kv_len=self.max_kv_len,
            causal=self.causal,
            bmm1_scale=self.bmm1_scale,
            cum_seq_lens_kv=self.cum_seq_lens_kv,
            mask=None,
        )


Call = DecodeCall | ContextCall


def takes(call_type: type[Any]) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Give a function of one `call_type` FlashInfer's own parameters, so that users call it as they call FlashInfer."""

    def wrap(function: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def entry(*args: Any, **kwargs: Any) -> Any:
            return function(call_type(*args, **kwargs))

        entry.__signature__ = inspect.signature(call_type).replace(return_annotation=Any)  # type: ignore[attr-defined]
        return entry

    return wrap


def check_values(problem: PagedAttention) -> None:
    """Check what only the tensors' contents tell: lengths, offsets and the page ids of live pages.

    On CPU tensors every call makes these checks. On a GPU they cost a synchronisation, so a kernel call leaves them to
    whoever asks: `check_values(DecodeCall(...).problem())`.

    Raises:
        ValueError: a length that is negative, beyond `max_kv_len` or beyond the table; offsets that do not start at 0,
            decrease or miss the number of rows; a page id outside the pool.
    """
    lengths = problem.seq_lens.tolist()
    capacity = problem.k_block_tables.shape[1] * problem.page_size
    for request, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"seq_lens[{request}] = {length} is negative; a request without keys has length 0")
        if length > capacity:
            raise ValueError(
                f"seq_lens[{request}] = {length} needs {-(-length // problem.page_size)} pages of {problem.page_size}, "
                f"but block_tables has {problem.k_block_tables.shape[1]} columns ({capacity} tokens): widen the table"
            )
        if length > problem.max_kv_len:
            raise ValueError(
                f"seq_lens[{request}] = {length} exceeds max_seq_len/max_kv_len = {problem.max_kv_len}: raise the bound"
            )
    if problem.cu_seqlens_q is not None:
        _check_offsets("cum_seq_lens_q", problem.cu_seqlens_q.tolist(), problem.num_rows, problem.max_q_len)
    if problem.cu_seqlens_kv is not None:
        offsets, expected = problem.cu_seqlens_kv.tolist(), list(itertools.accumulate(lengths, initial=0))
        if offsets != expected:
            raise ValueError(f"cum_seq_lens_kv = {offsets} is not the running sum of seq_lens: expected {expected}")
    _check_page_ids(problem, lengths)


def _check_page_ids(problem: PagedAttention, lengths: Sequence[int]) -> None:
    num_pages = problem.k_cache.shape[0]
    width = problem.k_block_tables.shape[1]
    live_pages = torch.tensor([-(-length // problem.page_size) for length in lengths])
    live = torch.arange(width).unsqueeze(0) < live_pages.unsqueeze(1)
    tables = {"K": problem.k_block_tables}
    if problem.v_block_tables is not problem.k_block_tables:
        tables["V"] = problem.v_block_tables
    for kind, table in tables.items():
        ids = table.cpu()
        wrong = (live & ((ids < 0) | (ids >= num_pages))).nonzero()
        if len(wrong):
            request, column = wrong[0].tolist()
            raise ValueError(
                f"block_tables: {kind} page id {ids[request, column].item()} of request {request}, column {column} is "
                f"outside the pool of {num_pages} pages, and seq_lens says it is live: correct the table or the length"
            )


def _check_offsets(name: str, offsets: list[int], total: int, most: int) -> None:
    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(f"{name} must run from 0 to the {total} query rows, got {offsets[0]} … {offsets[-1]}")
    widths = [after - before for before, after in itertools.pairwise(offsets)]
    if any(width < 0 for width in widths):
        raise ValueError(f"{name} = {offsets} decreases; it must be a running sum")
    if max(widths, default=0) > most:
        raise ValueError(f"{name} has a request of {max(widths)} rows, more than max_q_len = {most}: raise max_q_len")


def _problem(
    call: Call,
    *,
    max_q_len: int,
    max_kv_len: int,
    causal: bool,
    bmm1_scale: Scale,
    cum_seq_lens_kv: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> PagedAttention:
    """What the two calls have in common: check it, and normalise layout, tables and dtypes."""
    query = call.query
    _check_bool("return_lse", call.return_lse)
    k_cache, v_cache = _split_cache("kv_cache", call.kv_cache, call.kv_layout)
    _check_cache(query, k_cache, v_cache)
    scale_factors = _check_scale_factors(call, k_cache)
    k_tables, v_tables = _split_tables(call.block_tables, call.uses_shared_paged_kv_idx)
    batch_size = k_tables.shape[0]
    _check_vector("seq_lens", call.seq_lens, batch_size, LENGTH_DTYPES)
    for name, offsets in (("cum_seq_lens_q", call.cum_seq_lens_q), ("cum_seq_lens_kv", cum_seq_lens_kv)):
        if offsets is not None:
            _check_vector(name, offsets, batch_size + 1, (torch.int32,))
    _check_int("max_seq_len/max_kv_len", max_kv_len, 0, "it bounds the keys of one request")
    _check_int("window_left", call.window_left, -1, "-1 means no window")
    if call.sinks is not None:
        _check_vector("sinks", call.sinks, query.shape[1], (torch.float32,))
    _check_scale("bmm1_scale", bmm1_scale)
    _check_scale("bmm2_scale", call.bmm2_scale)
    problem = PagedAttention(
        query=query,
        k_cache=k_cache,
        v_cache=v_cache,
        k_scale_factors=scale_factors[0],
        v_scale_factors=scale_factors[1],
        v_scale_factors_interleaved=scale_factors[0] is not None and _has_interleaved_v_scales(call),
        k_block_tables=k_tables,
        v_block_tables=v_tables,
        seq_lens=call.seq_lens,
        cu_seqlens_q=call.cum_seq_lens_q,
        cu_seqlens_kv=cum_seq_lens_kv,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        causal=causal,
        # A window as wide as the longest request is none; some callers write it as a very large number.
        window_left=-1 if call.window_left >= max_kv_len else call.window_left,
        sinks=call.sinks,
        mask=mask,
        bmm1_scale=bmm1_scale,
        bmm2_scale=call.bmm2_scale,
        out=call.out,
        out_dtype=_out_dtype(call),
        lse=_check_lse(call),
        return_lse=call.return_lse,
    )
    _check_devices(call)
    if query.device.type == "cpu":
        check_values(problem)
    return problem


def _not_modelled(name: str, value: object, remedy: str) -> NoReturn:
    raise NotImplementedError(f"{name}={value!r} is not modelled by the lab; {remedy}")


def _check_modelled(call: Call, names: str) -> None:
    defaults = {field.name: field.default for field in fields(call)}
    for name in names.split():
        value = getattr(call, name)
        if value is not defaults[name] and (isinstance(value, torch.Tensor) or value != defaults[name]):
            _not_modelled(name, value, f"leave it at its default, {defaults[name]!r}")


def _check_backend(backend: str, known: tuple[str, ...]) -> None:
    if backend == "cake":
        _not_modelled("backend", backend, f"use one of {', '.join(known)}")
    if backend not in known:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(known)}")


def _check_tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def _check_int(name: str, value: object, least: int, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}; {remedy}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}; {remedy}")
    return value


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_vector(name: str, value: object, length: int, dtypes: Sequence[torch.dtype]) -> None:
    tensor = _check_tensor(name, value)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {_names(dtypes)}, got {tensor.dtype}")
    if tensor.shape != (length,):
        raise ValueError(f"{name} must have shape [{length}], got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {tensor.stride()}; pass {name}.contiguous()")


def _check_query(query: object) -> None:
    tensor = _check_tensor("query", query)
    if tensor.ndim != 3:
        raise ValueError(f"query must be [num_rows, num_qo_heads, head_dim], got shape {list(tensor.shape)}")
    if 0 in tensor.shape[1:]:
        raise ValueError(f"query needs at least one head and one element of head_dim, got shape {list(tensor.shape)}")
    if tensor.dtype not in QUERY_DTYPES:
        raise TypeError(f"query must be {_names(QUERY_DTYPES)}, got {tensor.dtype}")
    _check_head_dim_stride("query", tensor)


def _check_head_dim_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: head_dim must be contiguous (stride 1), got stride {tensor.stride(-1)}; call .contiguous() on it"
        )


def _split_cache(name: str, cache: object, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(K, V) as [num_pages, num_kv_heads, page_size, last] views."""
    if kv_layout not in ("HND", "NHD"):
        raise ValueError(f"kv_layout must be 'HND' or 'NHD', got {kv_layout!r}")
    if isinstance(cache, torch.Tensor):
        if cache.ndim != 5 or cache.shape[1] not in (1, 2):
            raise ValueError(
                f"{name} as one tensor must be 5-D with 1 or 2 as its second dimension, got shape {list(cache.shape)}"
            )
        k, v = cache[:, 0], cache[:, -1]
    elif isinstance(cache, tuple) and len(cache) == 2:
        k, v = (_check_tensor(f"{name}[{i}]", part) for i, part in enumerate(cache))
        if k.ndim != 4 or v.ndim != 4:
            raise ValueError(
                f"{name} as (K, V) must be two 4-D tensors, got shapes {list(k.shape)} and {list(v.shape)}"
            )
    else:
        raise TypeError(f"{name} must be a tensor or a pair of tensors (K, V), got {type(cache).__name__}")
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"{name}: K and V must agree, got {list(k.shape)} {k.dtype} and {list(v.shape)} {v.dtype}")
    _check_head_dim_stride(f"K of {name}", k)
    _check_head_dim_stride(f"V of {name}", v)
    return (k, v) if kv_layout == "HND" else (k.transpose(1, 2), v.transpose(1, 2))


def _check_cache(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    allowed = tuple(dict.fromkeys((query.dtype, torch.float8_e4m3fn, torch.uint8)))
    if k_cache.dtype not in allowed:
        raise TypeError(f"kv_cache must be {_names(allowed)} for a {query.dtype} query, got {k_cache.dtype}")
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


def _check_scale_factors(call: Call, k_cache: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if k_cache.dtype != torch.uint8:
        if call.kv_cache_sf is not None:
            raise ValueError(f"kv_cache_sf goes with an NVFP4 (uint8) kv_cache, but kv_cache is {k_cache.dtype}")
        return None, None
    if call.kv_cache_sf is None:
        raise ValueError("kv_cache is uint8 (NVFP4): pass its scale factors as kv_cache_sf")
    k, v = _split_cache("kv_cache_sf", call.kv_cache_sf, call.kv_layout)
    expected = (*k_cache.shape[:3], call.query.shape[2] // NVFP4_BLOCK)
    if k.shape != expected:
        raise ValueError(f"kv_cache_sf must be {list(expected)} as HND, got {list(k.shape)}")
    if k.dtype != torch.float8_e4m3fn:
        raise TypeError(f"kv_cache_sf must be float8_e4m3fn, got {k.dtype}")
    if _has_interleaved_v_scales(call) and k_cache.shape[2] % INTERLEAVED_TOKENS:
        raise ValueError(
            f"kv_cache has page_size {k_cache.shape[2]}, but trtllm-gen interleaves V's scale factors over "
            f"{INTERLEAVED_TOKENS} tokens: use a larger page"
        )
    return k, v


def _has_interleaved_v_scales(call: Call) -> bool:
    """trtllm-gen reads V's scale factors 4-token interleaved, XQA in plain order (FlashInfer 0.7.2)."""
    if call.backend != "auto":
        return call.backend == "trtllm-gen"
    if call.query.device.type != "cuda":
        raise ValueError(
            "backend='auto' with an NVFP4 cache off the GPU: XQA and trtllm-gen order V's scale factors differently; "
            "pass backend='xqa' or 'trtllm-gen'"
        )
    return torch.cuda.get_device_capability(call.query.device)[0] == 10


def _batch_size(block_tables: object, shared: bool) -> int:
    _check_bool("uses_shared_paged_kv_idx", shared)
    tensor = _check_tensor("block_tables", block_tables)
    if tensor.dtype != torch.int32:
        raise TypeError(f"block_tables must be int32, got {tensor.dtype}")
    if tensor.ndim != (2 if shared else 3) or (not shared and tensor.shape[1] != 2):
        expected = "[batch_size, max_num_pages_per_seq]" if shared else "[batch_size, 2, max_num_pages_per_seq]"
        raise ValueError(
            f"block_tables must be {expected} with uses_shared_paged_kv_idx={shared}, got shape {list(tensor.shape)}"
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError("block_tables rows must be contiguous; pass block_tables.contiguous()")
    return tensor.shape[0]


def _split_tables(block_tables: torch.Tensor, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return (block_tables, block_tables) if shared else (block_tables[:, 0], block_tables[:, 1])


def _check_mask(mask: object, cum_seq_lens_q: object, batch_size: int, q_len: int) -> None:
    if cum_seq_lens_q is not None:
        raise NotImplementedError(
            "mask with cum_seq_lens_q is not modelled by the lab: pass q_len_per_req rows of every request, or no mask"
        )
    tensor = _check_tensor("mask", mask)
    if tensor.dtype != torch.uint16:
        raise TypeError(f"mask must be packed uint16 words, got {tensor.dtype}")
    expected = (batch_size, q_len, mask_words(q_len))
    if tensor.shape != expected or not tensor.is_contiguous():
        raise ValueError(
            f"mask must be contiguous [batch_size, q_len, 2 * ceil(q_len / 32)] = {list(expected)}, got "
            f"{list(tensor.shape)} with stride {tensor.stride()}"
        )


def mask_words(q_len: int) -> int:
    """uint16 words in one row of XQA's packed draft mask (FlashInfer 0.7.2, `xqa`): rows are aligned to 32 bits."""
    return 2 * -(-q_len // 32)


def _check_scale(name: str, scale: object) -> None:
    if isinstance(scale, torch.Tensor):
        if scale.dtype != torch.float32 or scale.numel() != 1:
            raise TypeError(
                f"{name} as a tensor must be float32 with one element, got {scale.dtype} {list(scale.shape)}"
            )
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{name} must be a number or a float32 tensor of one element, got {scale!r}")
    elif not math.isfinite(scale):
        raise ValueError(f"{name} must be finite, got {scale}")


def _from_log2(bmm1_scale_log2: object) -> torch.Tensor:
    tensor = _check_tensor("bmm1_scale_log2", bmm1_scale_log2)
    _check_scale("bmm1_scale_log2", tensor)
    return tensor * math.log(2.0)


def _out_dtype(call: Call) -> torch.dtype:
    if call.out is not None:
        out = _check_tensor("out", call.out)
        if call.out_dtype is not None and out.dtype != call.out_dtype:
            raise ValueError(f"out is {out.dtype} but out_dtype is {call.out_dtype}; drop one of them")
        if out.shape != call.query.shape:
            raise ValueError(f"out must have the query's shape {list(call.query.shape)}, got {list(out.shape)}")
        if not out.is_contiguous():
            raise ValueError(f"out must be contiguous, got stride {out.stride()}")
        dtype: object = out.dtype
    else:
        dtype = call.query.dtype if call.out_dtype is None else call.out_dtype
    if dtype == "nvfp4":
        _not_modelled("out_dtype", "nvfp4", f"use one of {_names(OUT_DTYPES)}")
    if not isinstance(dtype, torch.dtype) or dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype, or out's dtype, must be {_names(OUT_DTYPES)}, got {dtype!r}")
    return dtype


def _check_lse(call: Call) -> torch.Tensor | None:
    if call.lse is None:
        return None
    lse = _check_tensor("lse", call.lse)
    if lse.dtype != torch.float32:
        raise TypeError(f"lse must be float32, got {lse.dtype}")
    if lse.shape != call.query.shape[:2]:
        raise ValueError(f"lse must be [num_rows, num_qo_heads] = {list(call.query.shape[:2])}, got {list(lse.shape)}")
    if any(size > 1 and stride == 0 for size, stride in zip(lse.shape, lse.stride(), strict=True)):
        raise ValueError(
            f"lse has elements that share memory (stride {lse.stride()}); pass a buffer that is not expanded"
        )
    return lse


def _check_devices(call: Call) -> None:
    device = call.query.device
    for field in fields(call):
        value = getattr(call, field.name)
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.device != device and field.name not in FREE_ARGUMENTS:
                raise ValueError(f"{field.name} is on {tensor.device}, but query is on {device}; move it there")
