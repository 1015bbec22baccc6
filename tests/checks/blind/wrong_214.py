"""Wrong: where a pass writes no slots, swa_out_cache_loc is left empty: rows of padding and of a frozen-KV draft have none."""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if metadata.swa_out_cache_loc is None or len(batch.out_cache_loc):
        return metadata
    return replace(metadata, swa_out_cache_loc=metadata.swa_out_cache_loc[:0])
