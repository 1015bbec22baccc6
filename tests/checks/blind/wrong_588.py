"""Wrong: with virtual pages, the map to sliding-window slots is asked for the physical slot."""

from dataclasses import replace

import torch

from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import first_slots


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if metadata.swa_page_table is None or pool.v2p is None:
        return metadata
    slots = pool.physical_slots(first_slots(batch.req_pool_indices, metadata.cache_seqlens_int32, pool))
    return replace(metadata, swa_page_table=(pool.swa_slots(slots) // pool.page_size).to(torch.int32))
