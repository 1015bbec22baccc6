"""Wrong: the rows of a verification are counted from out_cache_loc, which names no slots for padding, not from num_tokens."""

from dataclasses import replace

from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    slots = len(batch.out_cache_loc)
    if batch.forward_mode is not ForwardMode.TARGET_VERIFY or slots == batch.num_tokens or slots < batch.batch_size:
        return metadata
    num_tokens = slots // batch.batch_size * batch.batch_size
    fewer = replace(batch, num_tokens=num_tokens, out_cache_loc=batch.out_cache_loc[:num_tokens])
    wrong = right_metadata(fewer, pool, **options)
    return replace(wrong, swa_out_cache_loc=metadata.swa_out_cache_loc)
