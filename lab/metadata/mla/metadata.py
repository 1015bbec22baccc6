"""Build the arguments of TRT-LLM's MLA kernels for every forward mode, without reading the device on the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.kernels.serving.forward_metadata import PassBuffers
from lab.metadata.engine.backend import GraphMetadata
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import (
    DraftAttention,
    check_attends,
    device_lengths,
    exclusive_cumsum,
    first_slots,
    host_lengths,
    key_lens,
    max_query_rows,
    num_draft_tokens,
    num_pages,
    uncounted_tokens,
    uniform_boundaries,
)
from lab.named_enum import NamedEnum

MLA_PAGE_SIZES = (32, 64)  # tokens; what SGLang's server allows with this backend (0.5.23)
# A row of the block table has room for a multiple of this number of tokens, because the flashmla index kernel writes the pages
# of 4,096 tokens at a time (SGLang 0.5.11 to 0.5.23). FlashInfer 0.7.2 requires multiples of 128.
BLOCK_TABLE_TOKENS = 4096
DEAD_PAGE = -1  # the value of cells after a request's last page
SINK_PAGE = 0  # the pool's page for padding, which a kernel may always read
COUNTER_BATCH_SIZE = 8192  # smallest that SGLang 0.5.23 allocates for (`TRTLLM_MLA_MAX_BATCH_SIZE`)


class QueryLayout(NamedEnum):
    """How query rows are brought into the decode kernel's shape ``[batch_size, max_seq_len_q, heads, head_dim]``."""

    VIEW = "view"  # as a view: every request has ``max_seq_len_q`` rows
    PADDED = "padded"  # as a copy: rows of zeros follow the rows of each request, and their output is dropped


@dataclass(frozen=True, eq=False)
class TRTLLMMLADecodeMetadata:
    """The lengths and page table of an MLA decode call, in a decode, a verification or a draft extend."""

    #: ``[batch_size, width]`` int32 with contiguous rows: the pages of each request (the call's ``block_tables``). In an
    #: eager pass -1 follows the pages of each request
    block_kv_indices: Tensor
    #: ``[batch_size]`` int32, the keys of each request (the call's ``seq_lens``), padding rows of `QueryLayout.PADDED` included
    seq_lens_k: Tensor
    #: an upper bound of the keys of one request, known to the host; see `build_mla_decode_metadata` and `mla_max_seq_len`
    max_seq_len_k: int
    max_seq_len_q: int = 1  #: query rows of each request, padding included
    query_layout: QueryLayout = QueryLayout.VIEW
    #: number of query rows that a draft extend or ragged verification reads and writes; None in other passes. An eager draft
    #: extend counts the requests' rows. A ragged verification and a graph also count padding rows, whose output becomes 0
    sum_seq_lens_q: int | None = None
    #: ``[batch_size + 1]`` int32, first query row of each request in a draft extend or ragged verification; else None
    cu_seqlens_q: Tensor | None = None
    #: ``[batch_size]`` int32, query rows of each request in a draft extend or ragged verification; else None
    seq_lens_q: Tensor | None = None
    #: ``[batch_size]`` int32, with decode context parallelism: the keys of each request on all GPUs, while ``seq_lens_k``
    #: counts one GPU's keys. Else None
    global_seq_lens_k: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return self.seq_lens_k.shape[0]

    @property
    def num_rows(self) -> int:
        """Return how many query rows the decode call reads. The call writes the output of the same rows."""
        rows = self.sum_seq_lens_q
        return self.batch_size * self.max_seq_len_q if rows is None else rows

    @property
    def seq_lens(self) -> Tensor:
        return self.seq_lens_k

    @property
    def block_tables(self) -> Tensor:
        return self.block_kv_indices

    def leading(self, batch_size: int) -> "TRTLLMMLADecodeMetadata":
        sliced: dict[str, Any] = {
            name: value[: batch_size + (name == "cu_seqlens_q")]
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        rows = None if self.sum_seq_lens_q is None else batch_size * self.max_seq_len_q
        return replace(self, sum_seq_lens_q=rows, **sliced)

    def pass_buffers(
        self, seq_len_offset: int, query_rows: int | Tensor | None = None, out_cache_loc: Tensor | None = None
    ) -> PassBuffers:
        return PassBuffers(
            cache_seqlens=self.seq_lens_k,
            cu_seqlens_q=None if query_rows is None else self.cu_seqlens_q,
            page_table=self.block_kv_indices,
            seq_len_offset=seq_len_offset,
            query_rows=query_rows,
        )


@dataclass(frozen=True, eq=False)
class TRTLLMMLAPrefillMetadata:
    """The lengths of an MLA prefill's call, in which the new tokens of a request attend to each other, not to the cache."""

    max_seq_len: int  #: largest number of new tokens of a request
    cum_seq_lens: Tensor  #: ``[batch_size + 1]`` int32, 0 and the running sum of ``seq_lens``, for queries and keys
    #: ``[batch_size]`` int32, new tokens of each request, without its cached prefix. FlashInfer 0.7.2 reads int32; SGLang
    #: passes the dtype of its lengths, int64 in production
    seq_lens: Tensor
    fallback_to_flashinfer_impl: bool = False  #: True if the pass uses FlashInfer's own ragged kernels, not TRT-LLM's


def build_mla_metadata(
    batch: ForwardBatch,
    pool: KVPool,
    *,
    attention: DraftAttention = DraftAttention.MLA,
    disable_chunked_prefix_cache: bool = False,
    in_prefill_graph: bool = False,
) -> TRTLLMMLADecodeMetadata | TRTLLMMLAPrefillMetadata:
    """Build the metadata of one pass by `build_mla_prefill_metadata` for a prefill, else by `build_mla_decode_metadata`."""
    if batch.forward_mode.is_prefill:
        return build_mla_prefill_metadata(
            batch, pool, disable_chunked_prefix_cache=disable_chunked_prefix_cache, in_prefill_graph=in_prefill_graph
        )
    return build_mla_decode_metadata(batch, pool, attention)


def build_mla_decode_metadata(
    batch: ForwardBatch, pool: KVPool, attention: DraftAttention = DraftAttention.MLA
) -> TRTLLMMLADecodeMetadata:
    """Build the metadata of one eager pass on the decode kernel in new tensors (SGLang 0.5.23; ``DRAFT_EXTEND`` as in 0.5.12).

    ======================================  ==================================================  =====================
    mode                                    seq_lens_k                                          max_seq_len_k
    ======================================  ==================================================  =====================
    DECODE, IDLE                            seq_lens                                            max(seq_lens)
    draft step s: DECODE with a SpecInfo    seq_lens (MLA), seq_lens + s + 1 (MLA_WITH_OFFSET)  max(seq_lens_k)
    TARGET_VERIFY, q = num_tokens // bs     seq_lens + q                                        max(seq_lens_k)
    RAGGED_VERIFY, d = num_draft_tokens     seq_lens + d                                        max(seq_lens_k)
    DRAFT_EXTEND, DRAFT_EXTEND_V2           seq_lens - extend_seq_lens + max(extend_seq_lens)   max(seq_lens)
    ======================================  ==================================================  =====================

    Maxima are computed from ``seq_lens_cpu`` (`longest_request`). Without it, the pool's ``max_context_len`` replaces
    ``max(seq_lens)``. In a ragged verification the maximum counts the requests' rows twice, as SGLang's does.

    The query rows of a ragged verification are padded to d rows per request, as in SGLang (`forward_extend`). If the requests
    of a draft extend have different numbers of rows, they are padded to the largest number. SGLang pads them only if the number
    of requests does not divide the number of rows: it views 2 + 4 rows of two requests as 3 + 3. ``seq_lens_k`` counts padding
    rows, because the kernel assumes that a request's last row is at its last key.

    SGLang adds d, not q, to the lengths of a TARGET_VERIFY, even if they differ (docs/evidence/forward_modes.md).

    Column c of the block table has ``req_to_token[request, c * page_size] // page_size`` for every page with a token of the
    request, then page 0, the sink, for pages that only padding rows need, then -1. SGLang has stale values of the request table
    instead of the sink. The width is `mla_block_table_width` of the largest number of keys, padding rows included; SGLang
    computes it from ``max_seq_len_k``. The pool has pages of 32 or 64 tokens. Raises ValueError in a prefill or PREBUILT, if
    the backend does not support the pool or the attention, or if the batch lacks a number on the host that the mode needs.
    """
    check_mla(pool, attention)
    check_attends(batch, pool)
    if batch.forward_mode.is_prefill:
        raise ValueError(
            f"{batch.forward_mode!r} is a prefill, not on the decode kernel: use build_mla_prefill_metadata"
        )
    keys = key_lens(batch, attention)
    max_seq_len_k = longest_request(batch, pool) + uncounted_tokens(batch, attention)
    if not batch.forward_mode.query_rows.in_extend_seq_lens:
        width = mla_block_table_width(max_seq_len_k, pool.page_size)
        table = mla_block_table(batch.req_pool_indices, keys, keys, pool, width)
        return TRTLLMMLADecodeMetadata(table, keys, max_seq_len_k, max_query_rows(batch))
    rows = device_lengths(batch, "extend_seq_lens").to(torch.int32, copy=True)
    layout, most_keys = QueryLayout.PADDED, max_seq_len_k
    if batch.forward_mode.query_rows.are_bounded:
        max_rows, sum_rows = num_draft_tokens(batch), batch.num_tokens
    else:
        q_lens = host_lengths(batch, "extend_seq_lens_cpu")
        layout, max_rows, sum_rows = query_layout(q_lens), max_query_rows(batch), sum(q_lens)
        most_keys += max_rows if layout is QueryLayout.PADDED else 0
    padded_keys = keys - rows + max_rows
    width = mla_block_table_width(most_keys, pool.page_size)
    return TRTLLMMLADecodeMetadata(
        block_kv_indices=mla_block_table(batch.req_pool_indices, keys, padded_keys, pool, width),
        seq_lens_k=padded_keys,
        max_seq_len_k=max_seq_len_k,
        max_seq_len_q=max_rows,
        query_layout=layout,
        sum_seq_lens_q=sum_rows,
        cu_seqlens_q=exclusive_cumsum(rows),
        seq_lens_q=rows,
    )


def replan_outgrown(
    metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, build: Callable[[ForwardBatch], TRTLLMMLADecodeMetadata]
) -> TRTLLMMLADecodeMetadata:
    """Return `metadata`, or ``build(batch)`` if `batch` has more requests than `metadata`: padding for data parallelism adds
    requests after the metadata was built (SGLang 0.5.23's `forward_decode`, `forward_extend`).
    """
    return metadata if batch.batch_size <= metadata.batch_size else build(batch)


def build_mla_prefill_metadata(
    batch: ForwardBatch, pool: KVPool, *, disable_chunked_prefix_cache: bool = False, in_prefill_graph: bool = False
) -> TRTLLMMLAPrefillMetadata:
    """Build the metadata of one EXTEND, MIXED, SPLIT_PREFILL or DLLM_EXTEND (SGLang 0.5.23), eager or in a CUDA graph.

    The new tokens of a request attend to each other. Separate calls attend to the cached prefixes in chunks, and the LSE merges
    the results.

    Args:
        disable_chunked_prefix_cache: the server's setting. If it is set, a batch with a cached prefix uses FlashInfer's own
            ragged kernels, not TRT-LLM's.
        in_prefill_graph: whether the pass is captured in a CUDA graph of prefills, which never uses TRT-LLM's kernels.

    Raises:
        ValueError: the mode is no prefill, MLA does not support the pool, or the batch lacks a length that the mode needs.
    """
    check_mla(pool)
    check_attends(batch, pool)
    if not batch.forward_mode.is_prefill:
        raise ValueError(f"{batch.forward_mode!r} is no prefill: use build_mla_decode_metadata")
    max_seq_len = max(host_lengths(batch, "extend_seq_lens_cpu"), default=0)
    has_prefix = any(host_lengths(batch, "extend_prefix_lens_cpu"))
    seq_lens = (batch.seq_lens - device_lengths(batch, "extend_prefix_lens")).to(torch.int32)
    fallback = in_prefill_graph or (disable_chunked_prefix_cache and has_prefix)
    return TRTLLMMLAPrefillMetadata(max_seq_len, exclusive_cumsum(seq_lens), seq_lens, fallback)


def query_layout(rows: Sequence[int]) -> QueryLayout:
    return QueryLayout.VIEW if len(set(rows)) <= 1 else QueryLayout.PADDED


def mla_block_table_width(max_len: int, page_size: int) -> int:
    """Return the number of pages of a row of the block table: `max_len` is rounded up to a multiple of 4,096 tokens."""
    check_mla_page_size(page_size)
    return -(-max_len // BLOCK_TABLE_TOKENS) * (BLOCK_TABLE_TOKENS // page_size)


def check_mla_page_size(page_size: int) -> None:
    if page_size not in MLA_PAGE_SIZES:
        raise ValueError(f"page_size={page_size}: the TRT-LLM MLA backend has pages of {MLA_PAGE_SIZES} tokens")


def check_mla(pool: KVPool, attention: DraftAttention = DraftAttention.MLA, page_size: int | None = None) -> None:
    check_mla_page_size(pool.page_size if page_size is None else page_size)
    if pool.full_to_swa is not None:
        raise ValueError("the pool has sliding-window pages, which MLA does not use: make one without swa_num_pages")
    if not attention.is_mla:
        raise ValueError(f"{attention!r} is not MLA: use {DraftAttention.MLA!r} or {DraftAttention.MLA_WITH_OFFSET!r}")


def allocate_multi_ctas_kv_counters(
    max_batch_size: int, num_qo_heads: int, sm_count: int, device: torch.device | str
) -> Tensor:
    """Allocate trtllm-gen's ``multi_ctas_kv_counter_buffer``, uint8 zeros, for calls of up to ``max_batch_size`` requests on a
    GPU with ``sm_count`` SMs. If several CTAs compute one request, the buffer counts how many of them have finished.

    A counter has 4 bytes. There is one per request and head, for at least 8,192 requests as in SGLang 0.5.23. Their number is
    at least ``sm_count``, and a multiple of 8 (FlashInfer 0.7.2's `get_trtllm_gen_multi_ctas_kv_counter_bytes`). Kernels reset
    them to zero, so that one buffer serves all calls of a stream. Raises ValueError if an argument is below 1.
    """
    for name, number in (("max_batch_size", max_batch_size), ("num_qo_heads", num_qo_heads), ("sm_count", sm_count)):
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    counters = max(max(COUNTER_BATCH_SIZE, max_batch_size) * num_qo_heads, sm_count)
    return torch.zeros(-(-counters // 8) * 8 * 4, dtype=torch.uint8, device=device)


def longest_request(batch: ForwardBatch, pool: KVPool) -> int:
    """Return the largest of the batch's ``seq_lens_cpu``; without this list, the pool's ``max_context_len``. In a ragged
    verification the request's query rows are added to each length, as in SGLang 0.5.23 (`dspark_verify.py`). If the host does
    not know their numbers, ``num_draft_tokens`` is added.
    """
    lens = batch.seq_lens_cpu
    if lens is None:
        return pool.max_context_len
    if batch.forward_mode.query_rows.are_bounded:
        rows = batch.extend_seq_lens_cpu or [num_draft_tokens(batch)] * batch.batch_size
        lens = [length + own for length, own in zip(lens, rows, strict=True)]
    return max(lens, default=0)


def mla_block_table(rows: Tensor, keys: Tensor, padded_keys: Tensor, pool: KVPool, width: int) -> Tensor:
    """Return a block table ``[batch_size, width]`` int32. Row i has the pages of the first ``keys[i]`` tokens of
    request i, then page 0 up to ``padded_keys[i]`` tokens, then -1. ``rows[i]`` is the request's row in the request table.
    """
    pages = pool.pages(first_slots(rows, keys, pool)[:, :width])
    table = torch.nn.functional.pad(pages, (0, width - pages.shape[1]), value=SINK_PAGE)
    columns = torch.arange(width, device=pool.device)
    return table.masked_fill(columns >= num_pages(padded_keys, pool.page_size)[:, None], DEAD_PAGE)


def new_block_table(
    modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int, attention: DraftAttention, draft_extend: QueryLayout
) -> Tensor:
    """Allocate the block table that all CUDA graphs of a backend share, as SGLang's `init_cuda_graph_state` does:
    ``[max_batch_size, width]`` int32, with room for padding rows.

    All cells are -1 at first. A replay writes the cells of its requests' pages. Later cells of a row keep the values of earlier
    replays.
    """
    check_mla(pool, attention)
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
    padded_rows = max((mode.num_tokens_per_req for mode in modes if _pads_query_rows(mode, draft_extend)), default=0)
    width = mla_block_table_width(pool.max_context_len + padded_rows, pool.page_size)
    return torch.full((max_batch_size, width), DEAD_PAGE, dtype=torch.int32, device=pool.device)


def _pads_query_rows(mode: GraphMode, draft_extend: QueryLayout) -> bool:
    rows = mode.forward_mode.query_rows
    return rows.are_bounded or (rows is QueryRows.ACCEPTED and draft_extend is QueryLayout.PADDED)


class MLAGraphMetadata(GraphMetadata[TRTLLMMLADecodeMetadata]):
    """The metadata buffers of one forward mode for all CUDA graphs. `block_kv_indices`, from `new_block_table`, is shared by
    all modes. SGLang 0.5.23 stores metadata by batch size alone, so that a second mode replaces the first.

    Args:
        draft_extend: layout of query rows in ``DRAFT_EXTEND``. PADDED is right for any numbers of accepted tokens. VIEW, SGLang
            0.5.12's layout, is right only if every request accepts ``num_tokens_per_req`` tokens.
    """

    def __init__(
        self,
        mode: GraphMode,
        pool: KVPool,
        block_kv_indices: Tensor,
        attention: DraftAttention = DraftAttention.MLA,
        draft_extend: QueryLayout = QueryLayout.PADDED,
    ) -> None:
        size, width, extends = len(block_kv_indices), mode.num_tokens_per_req, mode.in_extend_seq_lens
        buffers = TRTLLMMLADecodeMetadata(
            block_kv_indices=block_kv_indices,
            seq_lens_k=block_kv_indices.new_zeros(size),
            max_seq_len_k=pool.max_context_len,
            max_seq_len_q=width,
            query_layout=QueryLayout.PADDED if _pads_query_rows(mode, draft_extend) else QueryLayout.VIEW,
            sum_seq_lens_q=size * width if extends else None,
            cu_seqlens_q=uniform_boundaries(size, width, pool.device) if extends else None,
            seq_lens_q=block_kv_indices.new_full((size,), width) if extends else None,
        )
        super().__init__(mode, pool, buffers, attention)

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        # With QueryLayout.VIEW, cu_seqlens_q and seq_lens_q are constant.
        rows = view.extend_seq_lens if self.buffers.query_layout is QueryLayout.PADDED else None
        return self.prepare_launch(
            view, rows, None if rows is None else partial(_add_padding, rows, self.pool.page_size)
        )


def _add_padding(rows: Tensor, page_size: int, metadata: TRTLLMMLADecodeMetadata) -> None:
    assert metadata.seq_lens_q is not None
    keys, table = metadata.seq_lens_k, metadata.block_kv_indices
    metadata.seq_lens_q.copy_(rows)
    own_pages = num_pages(keys, page_size)
    keys.sub_(metadata.seq_lens_q).add_(metadata.max_seq_len_q)  # the kernel's lengths count padding rows
    columns = torch.arange(table.shape[1], device=table.device)
    padding = (columns >= own_pages[:, None]) & (columns < num_pages(keys, page_size)[:, None])
    table.masked_fill_(padding, SINK_PAGE)
