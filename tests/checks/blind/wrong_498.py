"""Wrong: the sliding window's page table looks physical slots up in full_to_swa, which is indexed by virtual ones."""

from dataclasses import replace

import torch
from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import first_slots


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if pool.v2p is None or pool.full_to_swa is None:
        return metadata
    slots = first_slots(batch.req_pool_indices, metadata.cache_seqlens_int32, pool)
    pages = pool.swa_slots(pool.physical_slots(slots)) // pool.page_size
    return replace(metadata, swa_page_table=pages.to(torch.int32))
