"""Compare the metadata of forward passes with the expected metadata, which `lab.references.forward_metadata` computes.

Each function `wrong_…` returns a sentence about the first error, "" if there is none, or yields a sentence for each error.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mha.block_sparse import BlockSparseMetadata
from lab.metadata.mha.context_parallel import ZigzagShard
from lab.metadata.mha.metadata import TRTLLMMHAMetadata
from lab.metadata.mla.dsa import DSAMetadata
from lab.metadata.mla.dsv4 import TOKENS_ALONE, WITHOUT_INDEXER, DSV4Metadata
from lab.metadata.mla.metadata import (
    BLOCK_TABLE_TOKENS,
    DEAD_PAGE,
    QueryLayout,
    TRTLLMMLADecodeMetadata,
    TRTLLMMLAPrefillMetadata,
)
from lab.references.forward_metadata import (
    ForwardMetadata,
    block_sparse_forward_metadata,
    dsa_forward_metadata,
    dsv4_forward_metadata,
    encoder_only_verify,
    forward_metadata,
    mla_forward_metadata,
    query_length,
    zigzag_forward_metadata,
)

OF_DSV4_PREFILL = ("cum_seq_lens_q", "request_lens")  # tensors of `DSV4Metadata`


def wrong_shard(batch: ForwardBatch, pool: KVPool, shard: ZigzagShard, num_ranks: int, rank: int) -> str:
    rows, expected = zigzag_forward_metadata(batch, pool, num_ranks, rank)
    widest = max(len(zigzag_forward_metadata(batch, pool, num_ranks, each)[0]) for each in range(num_ranks))
    padded = -(-widest // (2 * num_ranks)) * 2 * num_ranks
    pairs: Pairs = {
        "rows": (shard.rows.tolist(), rows),
        "max_seq_len_q": (shard.metadata.max_seq_len_q, expected.max_seq_len_q),
        "num_padded_rows, the rank with the most rows and up to a multiple,": (shard.num_padded_rows, padded),
    }
    return _first_difference(pairs) or wrong_metadata(batch, pool, shard.metadata, expected)


def wrong_metadata(
    batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata, expected: ForwardMetadata | None = None
) -> str:
    expected = forward_metadata(batch, pool) if expected is None else expected
    pairs = {
        **_leading("cache_seqlens", metadata.cache_seqlens_int32, expected.cache_seqlens),
        **_leading("cu_seqlens_q", metadata.cu_seqlens_q, expected.cu_seqlens_q),
        **_leading("cu_seqlens_k", metadata.cu_seqlens_k, expected.cu_seqlens_k),
    }
    for name in ("swa_page_table", "swa_out_cache_loc"):
        pairs[f"there being a {name}"] = (getattr(metadata, name) is not None, getattr(expected, name) is not None)
    tables = {"page_table": (metadata.page_table, expected.page_table)}
    if expected.swa_page_table is not None and metadata.swa_page_table is not None:
        tables["swa_page_table"] = (metadata.swa_page_table, expected.swa_page_table)
    if expected.swa_out_cache_loc is not None and metadata.swa_out_cache_loc is not None:
        locations = metadata.swa_out_cache_loc[: batch.num_tokens].tolist()
        pairs["swa_out_cache_loc"] = (locations, expected.swa_out_cache_loc)
    if metadata.encoder_cache_seqlens is not None and metadata.encoder_page_table is not None:
        lens, rows = encoder_only_verify(batch, pool)
        pairs |= _leading("encoder_cache_seqlens", metadata.encoder_cache_seqlens, lens)
        tables["encoder_page_table"] = (metadata.encoder_page_table, rows)
    for name, (table, pages) in tables.items():
        pairs |= _rows(name, table, pages)
    return _first_difference(pairs)


def wrong_eager_metadata(
    batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata, *, expand_encoder_only_verify: bool | None = None
) -> str:
    n, has_swa = batch.batch_size, pool.full_to_swa is not None
    lengths = ("cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k")
    tables = ("page_table", "swa_page_table") if has_swa else ("page_table",)
    found = {name: getattr(metadata, name) for name in (*lengths, *tables)}
    for name, tensor in found.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32:
            return f"{name} is not an int32 tensor"
    max_seq_len_q = forward_metadata(batch, pool).max_seq_len_q
    if batch.forward_mode.query_rows.are_bounded and batch.extend_seq_lens_cpu is None:
        assert batch.spec_info is not None
        assert batch.spec_info.num_draft_tokens is not None
        max_seq_len_q = batch.spec_info.num_draft_tokens  # the host knows only this number
    shape = [n, -(-pool.max_context_len // pool.page_size)]
    locations = metadata.swa_out_cache_loc
    pairs: Pairs = {
        "max_seq_len_q": (metadata.max_seq_len_q, max_seq_len_q),
        **{f"the shape of {name}": (list(found[name].shape), [n + name.startswith("cu")]) for name in lengths},
        **{f"the shape of {name}": (list(found[name].shape), shape) for name in tables},
        **{f"{name} having packed rows": (found[name].is_contiguous(), True) for name in tables},
        "there being a swa_out_cache_loc": (locations is not None, has_swa),
    }
    if locations is not None:
        got = locations.dtype, list(locations.shape)
        pairs["dtype and shape of swa_out_cache_loc"] = got, (torch.int64, [batch.num_tokens])
    if expand_encoder_only_verify is not None:  # None: the caller does not know whether these tables are needed
        has_rows = expand_encoder_only_verify and batch.forward_mode.query_rows is QueryRows.DRAFT_TOKENS
        shapes = ([batch.num_tokens], [batch.num_tokens, shape[1]]) if has_rows else (None, None)
        of_rows = metadata.encoder_cache_seqlens, metadata.encoder_page_table
        found_shapes = tuple(None if each is None else list(each.shape) for each in of_rows)
        pairs["the shapes of encoder_cache_seqlens and encoder_page_table"] = found_shapes, shapes
    return _first_difference(pairs) or wrong_metadata(batch, pool, metadata)


def wrong_dead_cells(batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata) -> str:
    expected = forward_metadata(batch, pool)
    for name, rows in (("page_table", expected.page_table), ("swa_page_table", expected.swa_page_table or [])):
        for request, pages in enumerate(rows):
            dead = set(getattr(metadata, name)[request, len(pages) :].tolist()) - {0}  # page 0 is the sink
            if dead:
                return f"{name}[{request}] names {sorted(dead)[:4]} after its {len(pages)} live pages, not the sink"
    return ""


def wrong_mla_metadata(
    batch: ForwardBatch,
    pool: KVPool,
    metadata: TRTLLMMLADecodeMetadata,
    attention: DraftAttention,
    block: int | None = None,  # query rows per request in a CUDA graph; None in an eager pass
) -> str:
    expected = mla_forward_metadata(batch, pool, counts_draft=attention is not DraftAttention.MLA, block=block)
    beyond = metadata.block_kv_indices.shape[1] * pool.page_size % BLOCK_TABLE_TOKENS
    pairs = {
        **_leading("seq_lens_k", metadata.seq_lens_k, expected.seq_lens_k),
        "max_seq_len_q": (metadata.max_seq_len_q, expected.max_seq_len_q),
        "tokens of a row of the table beyond whole blocks": (beyond, 0),
    }
    if batch.forward_mode.query_rows.in_extend_seq_lens:
        assert metadata.cu_seqlens_q is not None
        pairs |= _leading("cu_seqlens_q", metadata.cu_seqlens_q, expected.cu_seqlens_q)
    return _first_difference(pairs | _rows("block_kv_indices", metadata.block_kv_indices, expected.block_table))


def wrong_eager_mla_metadata(
    batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMLADecodeMetadata, attention: DraftAttention
) -> Iterator[str]:
    for name in ("seq_lens_k", "block_kv_indices"):
        if (dtype := getattr(metadata, name).dtype) != torch.int32:
            yield f"{name} is {dtype}, not torch.int32"
    if wrong := wrong_mla_metadata(batch, pool, metadata, attention):
        yield wrong
        return
    expected = mla_forward_metadata(batch, pool, counts_draft=attention is not DraftAttention.MLA)
    rows_of_table = zip(metadata.block_kv_indices.tolist(), expected.block_table, strict=True)
    for request, (cells, pages) in enumerate(rows_of_table):
        if set(cells[len(pages) :]) - {DEAD_PAGE}:
            yield f"request {request}'s row of the table ends in {sorted(set(cells[len(pages) :]))}, not in -1"
    is_ragged = batch.forward_mode.query_rows.are_bounded
    padding = metadata.max_seq_len_q if batch.forward_mode.extends_draft else 0  # the call adds these to the bound
    if max(expected.seq_lens_k, default=0) > metadata.max_seq_len_k + padding:
        yield f"max_seq_len_k={metadata.max_seq_len_k} is less than the longest of {expected.seq_lens_k}"
    if batch.batch_size:  # without requests, no length defines the bound
        counted = max(seen - int(own) for seen, own in zip(expected.seq_lens_k, batch.seq_lens, strict=True))
        rows = max(batch.extend_seq_lens_cpu or (metadata.max_seq_len_q,)) if is_ragged else 0  # which DSpark has added
        known = pool.max_context_len if batch.seq_lens_cpu is None else max(batch.seq_lens_cpu) + rows
        if metadata.max_seq_len_k > known + max(counted, metadata.max_seq_len_q):
            yield f"max_seq_len_k={metadata.max_seq_len_k} is more than the {known} that the host knows, and the rows"
    if batch.forward_mode.query_rows.in_extend_seq_lens:
        q_lens = [query_length(batch, request) for request in range(batch.batch_size)]
        pairs: Pairs = {
            "seq_lens_q": (None if metadata.seq_lens_q is None else metadata.seq_lens_q.tolist(), q_lens),
            "sum_seq_lens_q": (metadata.sum_seq_lens_q, batch.num_tokens if is_ragged else sum(q_lens)),
        }
        if wrong := _first_difference(pairs):
            yield wrong
        if metadata.query_layout is QueryLayout.VIEW and (is_ragged or len(set(q_lens)) > 1):
            yield f"rows of {q_lens} are viewed as equally many"


def wrong_block_sparse_metadata(
    batch: ForwardBatch, pool: KVPool, metadata: BlockSparseMetadata, topk_pages: torch.Tensor
) -> str:
    lens, _ = block_sparse_forward_metadata(batch, pool, topk_pages)
    of_rows = metadata.seq_lens[:, : len(lens)].tolist()
    return _first_difference({"seq_lens": (of_rows, [lens] * len(topk_pages))})


def wrong_dsa_metadata(batch: ForwardBatch, pool: KVPool, metadata: DSAMetadata, topk_indices: torch.Tensor) -> str:
    lens, places = dsa_forward_metadata(batch, pool, topk_indices, index_topk=topk_indices.shape[1])
    pairs = _leading("seq_lens", metadata.seq_lens, lens)
    return _first_difference(
        pairs | _leading("the places of the selected entries", metadata.places(topk_indices), places)
    )


def wrong_dsv4_metadata(
    batch: ForwardBatch,
    pool: KVPool,
    metadata: DSV4Metadata,
    compress_ratio: int | None = None,
    topk_indices: torch.Tensor | None = None,
) -> str:
    mode = batch.forward_mode
    if compress_ratio is None:  # a draft model has no compressed entries
        is_draft = mode.extends_draft or (mode.query_rows is QueryRows.ONE and batch.spec_info is not None)
        compress_ratio = TOKENS_ALONE if is_draft else WITHOUT_INDEXER
    expected = dsv4_forward_metadata(batch, pool, compress_ratio=compress_ratio, topk_indices=topk_indices)
    rows, top_k = len(expected.seq_lens), 0
    tables = ("seq_lens", "window", "page_table")
    for name in (*tables, *(OF_DSV4_PREFILL if mode.is_prefill else ())):
        if not isinstance(getattr(metadata, name), torch.Tensor):
            return f"{name} is {getattr(metadata, name)}, not a tensor"
    counts, count = {name: len(getattr(metadata, name)) for name in tables}, max(rows, len(metadata.seq_lens))
    if wrong := _first_difference({f"the number of rows of {name}": (found, count) for name, found in counts.items()}):
        return wrong
    if topk_indices is not None:
        top_k = topk_indices.shape[1]
        topk_indices = torch.nn.functional.pad(topk_indices, (0, 0, 0, len(metadata.seq_lens) - rows))
    table = metadata.sparse_indices(compress_ratio, topk_indices)
    lens = metadata.sparse_topk_lens(compress_ratio, top_k)
    pairs = {
        "dtypes": ({each.dtype for each in (metadata.seq_lens, table)}, {torch.int32}),
        **_leading("seq_lens", metadata.seq_lens, expected.seq_lens),
        **_leading("sparse_topk_lens", lens, list(map(len, expected.sparse_indices))),
        **_rows("sparse_indices", table, expected.sparse_indices),
    }
    if mode.is_prefill:
        pairs |= {
            **{name: (getattr(metadata, name).tolist(), getattr(expected, name)) for name in OF_DSV4_PREFILL},
            "max_q_len": (metadata.max_q_len, max(batch.extend_seq_lens_cpu or (), default=0)),
        }
    return _first_difference(pairs)


def wrong_mla_prefill_metadata(
    batch: ForwardBatch,
    metadata: TRTLLMMLAPrefillMetadata,
    *,
    disable_chunked_prefix_cache: bool,
    in_prefill_graph: bool,
) -> Iterator[str]:
    rows = [query_length(batch, request) for request in range(batch.batch_size)]
    has_prefix = any(int(keys) > new for keys, new in zip(batch.seq_lens, rows, strict=True))
    falls_back = in_prefill_graph or (disable_chunked_prefix_cache and has_prefix)
    pairs = {
        "dtypes of seq_lens and cum_seq_lens": ({metadata.seq_lens.dtype, metadata.cum_seq_lens.dtype}, {torch.int32}),
        "seq_lens": (metadata.seq_lens.tolist(), rows),
        "cum_seq_lens": (metadata.cum_seq_lens.tolist(), list(itertools.accumulate(rows, initial=0))),
        "max_seq_len": (metadata.max_seq_len, max(rows, default=0)),
        "fallback_to_flashinfer_impl": (metadata.fallback_to_flashinfer_impl, falls_back),
    }
    if wrong := _first_difference(pairs):
        yield wrong


Pairs = dict[str, tuple[Any, Any]]  # name -> (actual value, expected value)


def _leading(name: str, tensor: torch.Tensor, expected: Sequence[Any]) -> Pairs:
    return {name: (tensor[: len(expected)].tolist(), expected)}


def _rows(name: str, table: torch.Tensor, expected: Sequence[Sequence[int]]) -> Pairs:
    return {f"{name}[{row}]": (table[row, : len(cells)].tolist(), cells) for row, cells in enumerate(expected)}


def _first_difference(pairs: Pairs) -> str:
    for name, (got, wanted) in pairs.items():
        if got != wanted:
            return f"{name} is {got}, expected {wanted}"
    return ""
