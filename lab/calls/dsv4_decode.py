"""FlashInfer's sparse MLA call of DeepSeek-V4 as data: its parameters, and the problem over two pools that it defines.

A request has one cache entry per token in the pool of recent tokens, and one entry per group of tokens in the pool of
compressed tokens. A row selects entries of both pools, and one softmax goes over all of them.
"""

from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch

from lab.calls import allowed, arguments
from lab.calls.problem import AttentionCall, PagedAttention, Scale, checked
from lab.calls.selection import WINDOW_COLUMNS, Names, check_selection, columns_in_use

BACKENDS = ("auto", "trtllm-gen")
OTHER_BACKENDS = ("cute-dsl", "sparse", "cake")  # FlashInfer has these backends, and the lab does not model them
COLUMNS_STEP = 4  # the number of columns is a multiple of it (mla/_core.py 1127)
NAMES = Names("sparse_indices", "sparse_topk_lens", "the number of columns of sparse_indices", WINDOW_COLUMNS)


@dataclass(frozen=True, eq=False, kw_only=True)
class TwoPools(PagedAttention):
    """The attention problem of a DeepSeek-V4 call. Each query row selects entries of two pools: recent and compressed tokens.
    The first 128 columns of `selected` are entries of recent tokens. A row at position p uses only the first p + 1 of them.
    """

    #: the first `WINDOW_COLUMNS` columns are indices of entries in `window_cache`, later columns indices in `k_cache`
    selected: torch.Tensor
    #: the pool of recent tokens, a view [num_pages, 1, page_size, head_dim]; each entry is a key and its value
    window_cache: torch.Tensor

    def of_one_pool(self) -> PagedAttention:
        pools = [cache[:, 0].flatten(0, 1) for cache in (self.window_cache, self.k_cache)]
        pool = torch.cat(pools)[:, None, None]
        is_entry = self.columns_in_use() & (self.selected >= 0)
        places = torch.where(self._is_window(), self.selected, self.selected + len(pools[0]))
        given = {each.name: getattr(self, each.name) for each in fields(PagedAttention)}
        given |= {"k_cache": pool, "v_cache": pool, "selected": torch.where(is_entry, places, -1)}
        return PagedAttention(**given | {"selected_lens": torch.full_like(places[:, 0], places.shape[1])})

    def columns_in_use(self) -> torch.Tensor:
        return columns_in_use(self.selected, self.selected_lens, self.seq_lens, self.row_offsets(), WINDOW_COLUMNS)

    def _is_window(self) -> torch.Tensor:
        return torch.arange(self.selected.shape[1], device=self.selected.device) < WINDOW_COLUMNS

    def _check_selection(self, lens: torch.Tensor | None, cells: torch.Tensor) -> None:
        window, compressed = (cache.shape[0] * cache.shape[2] for cache in (self.window_cache, self.k_cache))
        check_selection(self.selected, lens, cells & ~self._is_window(), compressed, NAMES)
        check_selection(self.selected, None, cells & self._is_window(), window, NAMES)
        for request, (kv_len, rows) in enumerate(zip(self.kv_lens(), self.q_lens(), strict=True)):
            if kv_len < rows:
                raise ValueError(
                    f"seq_lens[{request}] = {kv_len} is less than the request's {rows} query rows, whose tokens it counts"
                )


@dataclass(frozen=True, eq=False)
class DSV4DecodeCall:
    """The arguments of FlashInfer 0.7.2's `trtllm_batch_decode_sparse_mla_dsv4`: same names, order and defaults.

    Every query head reads the same cache entries, and an entry is both key and value. A row sees exactly the entries that its
    row of `sparse_indices` lists (`lab.calls.selection` has the exact rule). SGLang 0.5.23 decodes and prefills
    with this call (`deepseek_v4_trtllm_backend.py` 357 and 501). The last dimension of tensors is contiguous, and `sinks`,
    lengths, offsets and `out` are contiguous. `DecodeCall` documents the attributes that are not listed here. Line numbers
    below refer to mla/_core.py of FlashInfer 0.7.2.post1.

    Attributes:
        query: [batch_size, q_len_per_request, num_qo_heads, head_dim]; with `cum_seq_lens_q` [num_rows, num_qo_heads,
            head_dim]. FlashInfer takes bf16 and e4m3, a head_dim of 512, and 8, 16, 32, 64 or 128 heads (1100); the references
            take more.
        swa_kv_cache: the pool of recent tokens, [num_pages, 1, page_size, head_dim] or the same without the dimension of the
            only head; with kv_layout "NHD" [num_pages, page_size, 1, head_dim]. The query's dtype (1153).
        sparse_indices: int32 [num_rows, num_columns]: the entries that each row sees, as indices page * page_size + offset in
            the page. The first 128 columns are indices in `swa_kv_cache`, later columns in `compressed_kv_cache`; -1 is no
            entry (2020). num_columns is at least 128 and a multiple of 4 (1122). This argument and the next three may be None
            only with backends that the lab does not model.
        compressed_kv_cache: the pool of compressed tokens, in the form of `swa_kv_cache`, whose page size may differ. Both
            pools may be the same tensor.
        sparse_topk_lens: int32 [num_rows], number of columns that each row uses, from 128 to num_columns. The number
            includes the first 128 columns, even if they are -1 (1203). Columns after this number may contain any values.
        seq_lens: int32 [batch_size], number of tokens of each request, at least its number of rows (2673). It determines only
            the positions of rows: a row at position p uses only the first p + 1 of the first 128 columns (2017).
        out: where the output is written, the query's shape, contiguous. None makes a bfloat16 tensor for any dtype of the
            query. FlashInfer writes bf16 alone (1219).
        kv_layout: "HND" or "NHD", of both pools.
        cum_seq_lens_q: int32 [batch_size + 1] offsets of the query rows, for requests with different numbers of rows.
        max_q_len: int, upper bound of the rows of a request, required with `cum_seq_lens_q`. Without `cum_seq_lens_q`
            it must be None or q_len_per_request.
        sparse_indices_are_storage_offsets: None or False: `sparse_indices` are indices as above. If the tokens of a pool
            are not contiguous, this argument must be False (2751).

    The call returns no LSE. `backend` is "auto" or "trtllm-gen". The lab requires one row of `sparse_indices` for each query
    row, because FlashInfer does not write the output of other query rows (2697).
    """

    function: ClassVar[AttentionCall] = AttentionCall.DSV4_DECODE
    module: ClassVar[str] = "flashinfer.mla"

    query: torch.Tensor
    swa_kv_cache: torch.Tensor
    workspace_buffer: torch.Tensor | None
    sparse_indices: torch.Tensor | None = None
    compressed_kv_cache: torch.Tensor | None = None
    sparse_topk_lens: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    out: torch.Tensor | None = None
    bmm1_scale: Scale = 1.0
    bmm2_scale: Scale = 1.0
    sinks: torch.Tensor | None = None
    kv_layout: str = "HND"
    cum_seq_lens_q: torch.Tensor | None = None
    max_q_len: int | None = None
    enable_pdl: bool | None = None
    swa_topk_lens: torch.Tensor | None = None
    extra_sparse_indices: torch.Tensor | None = None
    extra_sparse_topk_lens: torch.Tensor | None = None
    backend: str = "auto"
    hca_swa_indices: torch.Tensor | None = None
    hca_compressed_block_tables: torch.Tensor | None = None
    hca_seq_lens: torch.Tensor | None = None
    hca_is_causal: bool = True
    hca_use_persistent: bool = False
    hca_sparse_indices_format: str | None = None
    remapped_sparse_indices_buffer: torch.Tensor | None = None
    sparse_indices_are_storage_offsets: bool | None = None
    dsv4_inv_rope_cos_sin_cache: torch.Tensor | None = None
    dsv4_output_scale: torch.Tensor | None = None
    sparse_topk_lens_offset: int = 0
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None
    kv_cache_format: str = field(default="fp8", kw_only=True)

    def problem(self) -> TwoPools:
        allowed.check_modelled(self, BACKENDS, OTHER_BACKENDS)
        rows = arguments.query_rows(self)
        arguments.check_devices(self)
        window, compressed = (self._pool(name) for name in ("swa_kv_cache", "compressed_kv_cache"))
        batch_size, max_q_len = self._batch()
        arguments.check_vector("seq_lens", self.seq_lens, batch_size, (torch.int32,))
        no_pages = torch.empty((batch_size, 0), dtype=torch.int32, device=rows.device)
        problem = TwoPools(
            query=rows,
            k_cache=compressed,
            v_cache=compressed,
            k_block_tables=no_pages,
            v_block_tables=no_pages,
            selected=self._selected(len(rows)),
            selected_lens=self.sparse_topk_lens,
            window_cache=window,
            cu_seqlens_kv=None,
            max_q_len=max_q_len,
            max_kv_len=torch.iinfo(torch.int32).max,  # the call bounds no length
            **arguments.common_fields(self, self.sinks),
            **arguments.latent_out(self, rows.shape[2], "the query's shape"),
        )
        arguments.check_results_apart(self)
        return checked(problem)

    def returned(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> torch.Tensor:
        return out.view(self.query.shape) if self.out is None else self.out

    def _pool(self, name: str) -> torch.Tensor:
        if self.kv_layout not in ("HND", "NHD"):
            raise ValueError(f"kv_layout must be 'HND' or 'NHD', got {self.kv_layout!r}")
        pool = arguments.check_tensor(name, getattr(self, name), (self.query.dtype,))
        head_dim, head_axis = self.query.shape[-1], 2 if self.kv_layout == "NHD" else 1
        pages = pool.unsqueeze(1) if pool.ndim == 3 and head_axis == 1 else pool
        if pages.ndim != 4 or pages.shape[head_axis] != 1 or pages.shape[3] != head_dim or 0 in pages.shape[1:]:
            form = "page_size, 1" if head_axis == 2 else "1, page_size"
            raise ValueError(
                f"{name} must be [num_pages, {form}, {head_dim}] with kv_layout={self.kv_layout!r}, got shape "
                f"{list(pool.shape)}"
            )
        arguments.check_head_dim_stride(name, pool)
        pages = pages.transpose(1, head_axis)
        lie_together = pages.stride(2) == head_dim and pages.stride(0) == pages.shape[2] * head_dim  # of one page too
        if self.sparse_indices_are_storage_offsets is None and not lie_together:
            raise ValueError(
                f"{name} has tokens that do not lie next to each other (stride {pool.stride()}): pass "
                "sparse_indices_are_storage_offsets=False, which says that sparse_indices count tokens"
            )
        return pages

    def _batch(self) -> tuple[int, int]:
        why = "it bounds the rows of one request"
        if self.cum_seq_lens_q is None:
            batch_size, q_len = self.query.shape[:2]
            if self.max_q_len is not None and arguments.check_int("max_q_len", self.max_q_len, 1, why) != q_len:
                raise ValueError(
                    f"max_q_len must be None or {q_len}, the query's second dimension, got {self.max_q_len}"
                )
            return batch_size, q_len
        offsets = arguments.check_tensor("cum_seq_lens_q", self.cum_seq_lens_q)
        if offsets.numel() < 2:
            raise ValueError(
                f"cum_seq_lens_q must be [batch_size + 1] of at least one request, got {list(offsets.shape)}"
            )
        arguments.check_vector("cum_seq_lens_q", offsets, offsets.numel(), (torch.int32,))
        bound = arguments.check_int("max_q_len", self.max_q_len, 1, why)
        return offsets.numel() - 1, bound

    def _selected(self, num_rows: int) -> torch.Tensor:
        table = arguments.check_tensor("sparse_indices", self.sparse_indices, (torch.int32,))
        if table.ndim != 2 or table.shape[1] < WINDOW_COLUMNS or table.shape[1] % COLUMNS_STEP:
            raise ValueError(
                f"sparse_indices must be [num_rows, num_columns] with a multiple of {COLUMNS_STEP} columns, at least "
                f"{WINDOW_COLUMNS}, got shape {list(table.shape)}"
            )
        if len(table) != num_rows:
            error = NotImplementedError if 0 < len(table) < num_rows else ValueError
            raise error(
                f"sparse_indices has {len(table)} rows and query {num_rows}: the lab wants one for each query row"
            )
        if table.stride(1) != 1:
            raise ValueError(f"sparse_indices rows must be contiguous, got stride {table.stride()}")
        arguments.check_vector("sparse_topk_lens", self.sparse_topk_lens, num_rows, (torch.int32,))
        return table
