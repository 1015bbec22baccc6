"""Virtual pages and a window: the window's page is looked up by the physical slot, but full_to_swa is indexed by virtual ones."""

from dataclasses import replace

import torch
from lab import metadata as lab_metadata
from lab.metadata.engine.lengths import first_slots

def build_mha_metadata(batch, pool, *, expand_encoder_only_verify=False):
    built = lab_metadata.build_mha_metadata(batch, pool, expand_encoder_only_verify=expand_encoder_only_verify)
    if built.swa_page_table is None:
        return built
    slots = pool.physical_slots(first_slots(batch.req_pool_indices, built.cache_seqlens_int32, pool))
    return replace(built, swa_page_table=(pool.swa_slots(slots) // pool.page_size).to(torch.int32))
