"""With virtual pages the window's table is looked up by the physical page of a token, not by its virtual one."""

from dataclasses import replace

import torch
from lab import metadata as lab_metadata
from lab.metadata.engine.lengths import first_slots


def build_mha_metadata(batch, pool, **more):
    built = lab_metadata.build_mha_metadata(batch, pool, **more)
    if built.swa_page_table is None or pool.v2p is None:
        return built
    slots = pool.physical_slots(first_slots(batch.req_pool_indices, built.cache_seqlens_int32, pool))
    return replace(built, swa_page_table=(pool.swa_slots(slots) // pool.page_size).to(torch.int32))
