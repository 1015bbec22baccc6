"""Wrong: a frozen-KV draft, whose step is -1, is counted as the first step of a draft that writes a token."""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def counting(metadata, tokens):
    """Return the metadata with so many keys more of each request."""
    keys = metadata.cache_seqlens_int32 + tokens
    ends = metadata.cu_seqlens_k.clone()
    ends[1:] = keys.cumsum(0)
    return replace(metadata, cache_seqlens_int32=keys.int(), cu_seqlens_k=ends)


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    return counting(metadata, 1) if batch.writes_no_kv else metadata
