"""Wrong: draft extend V2 adds its rows to the lengths, as a verification does."""

from dataclasses import replace

from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata


def counting(metadata, tokens):
    """Return the metadata with so many keys more of each request."""
    keys = metadata.cache_seqlens_int32 + tokens
    ends = metadata.cu_seqlens_k.clone()
    ends[1:] = keys.cumsum(0)
    return replace(metadata, cache_seqlens_int32=keys.int(), cu_seqlens_k=ends)


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.DRAFT_EXTEND_V2:
        return metadata
    return counting(metadata, batch.extend_seq_lens)
