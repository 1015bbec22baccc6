"""Wrong: the slots that a verification writes are not translated to the sliding-window pool."""

from dataclasses import replace

from lab.metadata import UncountedTokens
from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    slots = metadata.swa_out_cache_loc
    if slots is None or batch.forward_mode.uncounted is not UncountedTokens.QUERY_ROWS:
        return metadata
    slots = slots.clone()
    slots[: len(batch.out_cache_loc)] = batch.out_cache_loc
    return replace(metadata, swa_out_cache_loc=slots)
