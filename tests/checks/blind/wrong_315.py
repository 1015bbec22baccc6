"""Wrong: pages are kept by request: of a request that occurs twice in a batch, with different lengths, both rows of a page table
are those of the last one.
"""

from dataclasses import replace

import torch
from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    rows = batch.req_pool_indices.tolist()
    last = {row: i for i, row in enumerate(rows)}
    source = torch.tensor([last[row] for row in rows], dtype=torch.int64)
    changed = {"page_table": metadata.page_table[source]}
    if metadata.swa_page_table is not None:
        changed["swa_page_table"] = metadata.swa_page_table[source]
    if metadata.encoder_page_table is not None:
        changed["encoder_page_table"] = changed["page_table"].repeat_interleave(metadata.max_seq_len_q, dim=0)
    return replace(metadata, **changed)
