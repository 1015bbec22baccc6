"""A pass's metadata, held to the loops of `lab.references.forward_metadata`."""

from typing import Any

from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mha.metadata import TRTLLMMHAMetadata
from lab.metadata.mla.metadata import BLOCK_TABLE_TOKENS, TRTLLMMLADecodeMetadata
from lab.references.forward_metadata import forward_metadata, mla_forward_metadata


def wrong_metadata(batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata) -> str:
    """Say in a sentence what is wrong with the metadata's live cells; empty if nothing is.

    Args:
        batch, pool: the metadata was made from them.
        metadata: for this batch, or for a larger one that it was padded to.
    """
    n, expected = batch.batch_size, forward_metadata(batch, pool)
    pairs: dict[str, tuple[Any, Any]] = {
        "cache_seqlens": (metadata.cache_seqlens_int32[:n].tolist(), expected.cache_seqlens),
        "cu_seqlens_q": (metadata.cu_seqlens_q[: n + 1].tolist(), expected.cu_seqlens_q),
        "cu_seqlens_k": (metadata.cu_seqlens_k[: n + 1].tolist(), expected.cu_seqlens_k),
    }
    tables = {"page_table": (metadata.page_table, expected.page_table)}
    if expected.swa_page_table is not None and metadata.swa_page_table is not None:
        tables["swa_page_table"] = (metadata.swa_page_table, expected.swa_page_table)
    if expected.swa_out_cache_loc is not None and metadata.swa_out_cache_loc is not None:
        locations = metadata.swa_out_cache_loc[: batch.num_tokens].tolist()
        pairs["swa_out_cache_loc"] = (locations, expected.swa_out_cache_loc)
    for name, (table, pages) in tables.items():
        pairs |= {f"{name}[{i}]": (table[i, : len(row)].tolist(), row) for i, row in enumerate(pages)}
    return _first_difference(pairs)


def wrong_mla_metadata(
    batch: ForwardBatch,
    pool: KVPool,
    metadata: TRTLLMMLADecodeMetadata,
    attention: DraftAttention,
    block: int | None = None,
) -> str:
    """Say the same of the MLA backend's metadata. Cells after a row's live ones are not looked at.

    Args:
        batch, pool, metadata: as in `wrong_metadata`.
        attention: the keys that a draft step counts.
        block: rows per request that a graph was captured with; None in an eager pass.
    """
    n = batch.batch_size
    expected = mla_forward_metadata(batch, pool, counts_draft=attention is not DraftAttention.MLA, block=block)
    pairs: dict[str, tuple[Any, Any]] = {
        "seq_lens_k": (metadata.seq_lens_k[:n].tolist(), expected.seq_lens_k),
        "max_seq_len_q": (metadata.max_seq_len_q, expected.max_seq_len_q),
        "tokens of a row of the table beyond whole blocks": (
            metadata.block_kv_indices.shape[1] * pool.page_size % BLOCK_TABLE_TOKENS,
            0,
        ),
    }
    if batch.forward_mode.extends_draft:
        assert metadata.cu_seqlens_q is not None
        pairs["cu_seqlens_q"] = (metadata.cu_seqlens_q[: n + 1].tolist(), expected.cu_seqlens_q)
    for i, pages in enumerate(expected.block_table):
        pairs[f"block_kv_indices[{i}]"] = (metadata.block_kv_indices[i, : len(pages)].tolist(), pages)
    return _first_difference(pairs)


def _first_difference(pairs: dict[str, tuple[Any, Any]]) -> str:
    """Name the first pair that differs, as got and as expected; empty if none does."""
    for name, (got, wanted) in pairs.items():
        if got != wanted:
            return f"{name} is {got}, expected {wanted}"
    return ""
