"""Wrong: pages of the window that were evicted are -1 in its table, not the sink."""

from dataclasses import replace

import torch
from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import num_pages


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    table = metadata.swa_page_table
    if table is None:
        return metadata
    pages = num_pages(metadata.cache_seqlens_int32, pool.page_size)
    live = torch.arange(table.shape[1], device=table.device) < pages.unsqueeze(1)
    return replace(metadata, swa_page_table=table.masked_fill(live & (table == 0), -1))
