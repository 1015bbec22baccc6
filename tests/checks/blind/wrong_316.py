"""Wrong: the sliding window's page table is filled for seq_lens as the batch has them, without the draft tokens that a draft
step or a verification adds; page_table is right.
"""

from dataclasses import replace

import torch
from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if metadata.swa_page_table is None:
        return metadata
    pages = -(-batch.seq_lens.long() // pool.page_size)
    column = torch.arange(metadata.swa_page_table.shape[1])
    table = metadata.swa_page_table.masked_fill(column >= pages.unsqueeze(1), 0)
    return replace(metadata, swa_page_table=table)
