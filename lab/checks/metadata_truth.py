"""What a pass's metadata must be, as the loops of `lab.references.forward_metadata` have it, and whether it is."""

from lab.metadata.forward_batch import ForwardBatch
from lab.metadata.kv_pool import KVPool
from lab.metadata.mha import TRTLLMMHAMetadata
from lab.references.forward_metadata import forward_metadata


def wrong_metadata(batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata) -> str:
    """What is wrong with the metadata's live cells, in a sentence; empty if nothing is.

    Args:
        batch, pool: what it was made from.
        metadata: for this batch, or for a larger one that it was padded to.
    """
    n, expected = batch.batch_size, forward_metadata(batch, pool)
    pairs = {
        "cache_seqlens": (metadata.cache_seqlens_int32[:n], expected.cache_seqlens),
        "cu_seqlens_q": (metadata.cu_seqlens_q[: n + 1], expected.cu_seqlens_q),
        "cu_seqlens_k": (metadata.cu_seqlens_k[: n + 1], expected.cu_seqlens_k),
    }
    tables = {"page_table": (metadata.page_table, expected.page_table)}
    if expected.swa_page_table is not None and metadata.swa_page_table is not None:
        tables["swa_page_table"] = (metadata.swa_page_table, expected.swa_page_table)
    if expected.swa_out_cache_loc is not None and metadata.swa_out_cache_loc is not None:
        locations = metadata.swa_out_cache_loc[: batch.num_tokens]
        pairs["swa_out_cache_loc"] = (locations, expected.swa_out_cache_loc)
    for name, (table, pages) in tables.items():
        pairs |= {f"{name}[{i}]": (table[i, : len(row)], row) for i, row in enumerate(pages)}
    for name, (got, wanted) in pairs.items():
        if got.tolist() != wanted:
            return f"{name} is {got.tolist()}, expected {wanted}"
    return ""
