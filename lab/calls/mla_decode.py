"""FlashInfer's MLA decode call as data: its parameters, and the paged attention problem that it defines."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lab.calls import allowed, arguments, context_parallel
from lab.calls.problem import E4M3, AttentionCall, PagedAttention, Scale, checked

BACKENDS = ("auto", "xqa", "trtllm-gen", "cute-dsl")
OTHER_BACKENDS = ("cake", "sparse")  # FlashInfer has these backends, and the lab does not model them
LSE_BASES = (None, "base2", "basee")
WITH_TOP_K: allowed.Reasons = {  # FlashInfer 0.7.2, mla/_core.py 4414
    "skip_softmax_threshold_scale_factor": ((None,), "selected entries are not skipped")
}


def lse_is_base_e(given: Mapping[str, Any]) -> bool:
    """Return True if an MLA decode call with the arguments `given` returns its LSE as a natural logarithm: `return_lse_base` is
    "basee", or `return_lse_base` is None and the backend is "cute-dsl" (FlashInfer 0.7.2, mla/_core.py 3994).
    """
    default = "basee" if given.get("backend") == "cute-dsl" else "base2"
    return (given.get("return_lse_base") or default) == "basee"


@dataclass(frozen=True, eq=False)
class MLADecodeCall:
    """The arguments of FlashInfer 0.7.2's `trtllm_batch_decode_with_kv_cache_mla`: same names, order and defaults.

    Multi-head latent attention after absorption: every query head reads the same cache entries. A key is a whole entry, the
    latent vector and then the rotary part; its value is the latent vector, the entry's first `kv_lora_rank` elements. The last
    dimension of `query`, `kv_cache` and `block_tables` is contiguous. Their other strides are free as long as no elements
    overlap. Other tensors are contiguous. `DecodeCall` documents which keys rows see, which memory may contain any values, the
    alignment of tensors, and the attributes that are not listed here.

    Attributes:
        query: [batch_size, q_len_per_request, num_qo_heads, kv_lora_rank + qk_rope_head_dim], the latent part first; with
            `cum_seq_lens_q` [num_rows, num_qo_heads, kv_lora_rank + qk_rope_head_dim]. fp16, bf16 or e4m3
            (references also take float32 and float64).
        kv_cache: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim], or the same with a second dimension of 1 for
            the only head. The query's dtype, or e4m3.
        qk_nope_head_dim: head_dim before absorption, without the rotary part; it changes no result.
        kv_lora_rank, qk_rope_head_dim: elements of the latent vector, and of the rotary part.
        block_tables: int32 [batch_size, max_num_pages_per_seq]. With `sparse_mla_top_k` the entries that each query row sees,
            int32 [batch_size, q_len_per_request, sparse_mla_top_k], or with `cum_seq_lens_q` [num_rows, sparse_mla_top_k].
            An entry is the index page * page_size + offset in the page; -1 in any column is no entry.
        sparse_mla_top_k: number of columns with entries in `block_tables`; 0: `block_tables` has pages, and rows are
            causal. If it is not 0, a row at position p uses its first p + 1 columns (`lab.calls.selection` has the rule and
            its sources). The order of entries changes no result, an entry in two columns counts twice, and a row without
            entries sees no key.
        out: where the output is written, the query's shape with a last dimension of `kv_lora_rank`, contiguous. None makes a
            bfloat16 tensor for any dtype of the query, as FlashInfer does.
        sinks: float32 [num_qo_heads] (the form that trtllm-gen reads), or a list or tuple of one such tensor (as FlashInfer
            annotates it): exp(sink) of each head is added to the softmax's denominator.
        cum_seq_lens_q: int32 [batch_size + 1] offsets of the query rows, for requests with different numbers of rows. Query
            rows after the last offset are padding.
        max_q_len: int, upper bound of the rows of a request, with `cum_seq_lens_q`. None: the host reads the offsets,
            which synchronises.
        lse: where the LSE is written, float32 and contiguous: [num_rows, num_qo_heads], or without `cum_seq_lens_q`
            [batch_size, q_len_per_request, num_qo_heads]. `lse` requires `return_lse`, without which FlashInfer's trtllm-gen
            does not write the LSE.
        return_lse: return (out, lse); a new lse is [num_rows, num_qo_heads].
        return_lse_base: "base2" for log2, "basee" for the natural logarithm of the softmax's denominator, the sink
            included. None is "basee" with backend "cute-dsl", else "base2". Backend "auto" with `cum_seq_lens_q` or
            `enable_dcp`, for which FlashInfer has only CuTe DSL, requires a base. In other calls "auto" on SM100 and
            SM103 selects trtllm-gen or CuTe DSL, with autotuning whichever is faster (mla/_core.py 4728-4845), so that
            the base of None is not known.
        sparse_mla_top_k_lens: int32 [num_rows]: each row uses this number of first columns. Later columns may contain
            any values. FlashInfer requires it if there is no rotary part, and refuses it otherwise. Each row then needs
            at least one entry, and no -1 before its last entry.
        skip_softmax_threshold_scale_factor: must be None with `sparse_mla_top_k`.
        enable_dcp: True makes the call one rank's part of context parallelism: the cache has only the rank's keys
            (`lab.calls.context_parallel`). True requires `return_lse` and excludes sinks.
        causal_seqlens_kv_global: int32 [batch_size], the number of keys, on all ranks, that the newest row of each request
            sees; None without `enable_dcp`.
        is_var_seq: False promises FlashInfer that all requests have equally many keys. The lab does not rely on it.
        cute_dsl_impl: "auto", "modular" or "monolithic": which kernels of CuTe DSL run. It changes no result.
        kv_scale_format: "auto", "pow2_fp32" or "arbitrary_fp32": the scales of a packed (uint8) cache, which the lab refuses.
            Kernels of other caches ignore it.

    `backend` is "auto", "xqa", "trtllm-gen" or "cute-dsl".
    """

    function: ClassVar[AttentionCall] = AttentionCall.MLA_DECODE
    module: ClassVar[str] = "flashinfer.decode"

    query: torch.Tensor
    kv_cache: torch.Tensor
    workspace_buffer: torch.Tensor | None
    qk_nope_head_dim: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    sparse_mla_top_k: int = 0
    out: torch.Tensor | None = None
    bmm1_scale: Scale = 1.0
    bmm2_scale: Scale = 1.0
    sinks: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...] | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    enable_pdl: bool | None = None
    backend: str = "auto"
    is_var_seq: bool = True
    uses_shared_paged_kv_idx: bool = True
    lse: torch.Tensor | None = None
    return_lse: bool = False
    cute_dsl_impl: str = "auto"
    kv_scale_format: str = "auto"
    cum_seq_lens_q: torch.Tensor | None = None
    max_q_len: int | None = None
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None
    sparse_mla_top_k_lens: torch.Tensor | None = None
    enable_dcp: bool = False
    cp_world: int = 1
    cp_rank: int = 0
    causal_seqlens_kv_global: torch.Tensor | None = None
    use_fp16_softmax: bool | None = None
    return_lse_base: str | None = None

    def problem(self) -> PagedAttention:
        """Check the arguments and return the attention problem that they define. An LSE of the problem is always in base 2."""
        allowed.check_modelled(self, BACKENDS, OTHER_BACKENDS)
        arguments.check_bool("uses_shared_paged_kv_idx", self.uses_shared_paged_kv_idx)
        if not self.uses_shared_paged_kv_idx:
            allowed.not_modelled(
                "uses_shared_paged_kv_idx",
                False,
                "one cache entry is a key and its value, so pass block_tables as [batch_size, max_num_pages_per_seq]",
            )
        rows = self._query_rows()
        arguments.check_devices(self)
        cache = self._cache_pages()
        batch_size = self._batch_size()
        arguments.check_vector("seq_lens", self.seq_lens, batch_size, arguments.LENGTH_DTYPES)
        selected = self._selected(len(rows))
        tables = self.block_tables
        if selected is not None:
            tables = torch.empty((batch_size, 0), dtype=torch.int32, device=selected.device)
        sinks = self.sinks
        if isinstance(sinks, (list, tuple)):
            if len(sinks) != 1:
                raise ValueError(f"sinks must be one tensor, or a list of one, got {len(sinks)} of them")
            sinks = sinks[0]
        problem = PagedAttention(
            query=rows,
            k_cache=cache,
            v_cache=cache[..., : self.kv_lora_rank],
            k_block_tables=tables,
            v_block_tables=tables,
            selected=selected,
            selected_lens=self.sparse_mla_top_k_lens,
            cu_seqlens_kv=None,
            max_q_len=self._max_q_len(batch_size),
            max_kv_len=arguments.check_int("max_seq_len", self.max_seq_len, 0, "it bounds the keys of one request"),
            **arguments.common_fields(self, sinks),
            **arguments.latent_out(self, self.kv_lora_rank, "its last dimension kv_lora_rank"),
            lse=self._lse_rows(rows),
            return_lse=self.return_lse,
        )
        arguments.check_bool("enable_dcp", self.enable_dcp)
        if arguments.takes_rank(self) or self.enable_dcp:
            argument = "enable_dcp=True" if self.enable_dcp else ""
            problem = context_parallel.problem_of_rank(self, problem, argument, context_parallel.WITH_RANK_MLA)
        arguments.check_results_apart(self)
        return checked(problem)

    def returned(self, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
        given_shape = self.out if self.out is not None else out.view(*self.query.shape[:-1], self.kv_lora_rank)
        return (given_shape, lse if self.lse is None else self.lse) if self.return_lse else given_shape

    @property
    def lse_is_base_e(self) -> bool:
        return lse_is_base_e(vars(self))

    def _query_rows(self) -> torch.Tensor:
        arguments.check_int(
            "qk_nope_head_dim", self.qk_nope_head_dim, 1, "it is head_dim before absorption, without rotary part"
        )
        rank = arguments.check_int("kv_lora_rank", self.kv_lora_rank, 1, "it is the size of the latent vector")
        rope = arguments.check_int("qk_rope_head_dim", self.qk_rope_head_dim, 0, "it is the size of the rotary part")
        rows = arguments.query_rows(self, "kv_lora_rank + qk_rope_head_dim")
        if rows.shape[-1] != rank + rope:
            raise ValueError(
                f"query has head_dim {rows.shape[-1]}, but kv_lora_rank={rank} and qk_rope_head_dim={rope} make "
                f"{rank + rope}"
            )
        return rows

    def _cache_pages(self) -> torch.Tensor:
        cache = arguments.check_tensor("kv_cache", self.kv_cache)
        allowed = tuple(dict.fromkeys((self.query.dtype, E4M3)))
        if cache.dtype == torch.uint8:
            why = "FlashInfer has no dense MLA kernel for it"
            if self.sparse_mla_top_k:
                why = "the lab does not model the packed entries of FlashInfer's sparse kernel for SM120"
            raise NotImplementedError(f"kv_cache is uint8 (packed): {why}; use {arguments.dtype_names(allowed)}")
        if cache.dtype not in allowed:
            raise TypeError(
                f"kv_cache must be {arguments.dtype_names(allowed)} for a {self.query.dtype} query, got {cache.dtype}"
            )
        head_dim = self.query.shape[-1]
        one_head = cache.ndim == 3 or (cache.ndim == 4 and cache.shape[1] == 1)
        if not one_head or cache.shape[-1] != head_dim:
            raise ValueError(
                f"kv_cache must be [num_pages, page_size, {head_dim}] or [num_pages, 1, page_size, {head_dim}] (one head, "
                f"entries of kv_lora_rank + qk_rope_head_dim), got shape {list(cache.shape)}"
            )
        arguments.check_head_dim_stride("kv_cache", cache)
        page_size = cache.shape[-2]
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"kv_cache has page_size {page_size}; it must be a power of two")
        return cache.unsqueeze(1) if cache.ndim == 3 else cache

    def _batch_size(self) -> int:
        if arguments.check_int("sparse_mla_top_k", self.sparse_mla_top_k, 0, "0 means a page table"):
            is_ragged = self.cum_seq_lens_q is not None
            return len(arguments.check_tensor("seq_lens", self.seq_lens)) if is_ragged else len(self.query)
        batch_size = arguments.batch_size_of(self.block_tables, True)
        if self.cum_seq_lens_q is None and self.query.shape[0] != batch_size:
            raise ValueError(
                f"query has {self.query.shape[0]} requests, but block_tables has {batch_size} rows: "
                "one row per request is needed"
            )
        return batch_size

    def _selected(self, num_rows: int) -> torch.Tensor | None:
        top_k, lens = self.sparse_mla_top_k, self.sparse_mla_top_k_lens
        if not top_k:
            if lens is not None:
                raise ValueError(
                    "sparse_mla_top_k_lens counts entries of sparse_mla_top_k, which is 0: pass both or neither"
                )
            return None
        allowed.check_combination(self, f"sparse_mla_top_k={top_k}", WITH_TOP_K)
        if lens is not None:
            arguments.check_vector("sparse_mla_top_k_lens", lens, num_rows, (torch.int32,))
        table = arguments.check_tensor("block_tables", self.block_tables, (torch.int32,))
        expected = (*self.query.shape[:-2], top_k)
        if table.shape != expected:
            raise ValueError(
                f"block_tables must be {list(expected)} with sparse_mla_top_k={top_k}: the entries of each query row, got "
                f"shape {list(table.shape)}"
            )
        arguments.check_table_rows(table)
        if table.ndim == 2:
            return table
        if table.shape[0] > 1 < table.shape[1] and table.stride(0) != table.shape[1] * table.stride(1):
            raise ValueError(
                f"block_tables has requests at another stride than rows, {table.stride()}; pass block_tables.contiguous()"
            )
        return table.flatten(0, 1)

    def _max_q_len(self, batch_size: int) -> int:
        if self.cum_seq_lens_q is None:
            if self.max_q_len is not None:
                raise ValueError(
                    f"max_q_len={self.max_q_len} needs cum_seq_lens_q; without it the query's second dimension says it"
                )
            return self.query.shape[1]
        arguments.check_vector("cum_seq_lens_q", self.cum_seq_lens_q, batch_size + 1, (torch.int32,))
        if self.max_q_len is None:
            return max(self.cum_seq_lens_q.diff().tolist(), default=0)
        return arguments.check_int("max_q_len", self.max_q_len, 0, "it bounds the rows of one request")

    def _lse_rows(self, rows: torch.Tensor) -> torch.Tensor | None:
        arguments.check_bool("return_lse", self.return_lse)
        if self.return_lse_base not in LSE_BASES:
            raise ValueError(f"return_lse_base must be 'base2', 'basee' or None, got {self.return_lse_base!r}")
        for name, is_given in (("cum_seq_lens_q", self.cum_seq_lens_q is not None), ("enable_dcp", self.enable_dcp)):
            if self.return_lse and is_given and self.return_lse_base is None and self.backend != "cute-dsl":
                raise ValueError(
                    f"return_lse with {name} needs return_lse_base='base2' or 'basee': FlashInfer's None is base 2 in one "
                    "backend and e in the one that takes this call"
                )
        if self.lse is None:
            return None
        if not self.return_lse:
            raise ValueError("lse without return_lse=True is left unwritten by FlashInfer; pass both or neither")
        lse = arguments.check_tensor("lse", self.lse, (torch.float32,))
        shapes = list(dict.fromkeys((tuple(rows.shape[:2]), tuple(self.query.shape[:-1]))))
        if tuple(lse.shape) not in shapes:
            raise ValueError(f"lse must be {' or '.join(str(list(shape)) for shape in shapes)}, got {list(lse.shape)}")
        if not lse.is_contiguous():
            raise ValueError(f"lse must be contiguous, got stride {lse.stride()}")
        return lse.view(rows.shape[:2])
