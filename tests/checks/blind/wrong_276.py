"""Wrong: columns of a page table are not held against its width: of a request with more keys than the context, zeros for the
further pages go to the start of the next request's row.
"""

from dataclasses import replace

import torch
from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import num_pages


def overrun(table, pages):
    """Return the table with zeros where pages beyond the width of the row before lie."""
    if table is None or len(table) < 2:
        return table
    beyond = torch.nn.functional.pad(pages - table.shape[1], (1, 0))[:-1]
    columns = torch.arange(table.shape[1], device=table.device)
    return table.masked_fill(columns < beyond.unsqueeze(1), 0)


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    pages = num_pages(metadata.cache_seqlens_int32, pool.page_size)
    table = overrun(metadata.page_table, pages)
    if metadata.encoder_page_table is not None:
        metadata = replace(metadata, encoder_page_table=table.repeat_interleave(metadata.max_seq_len_q, dim=0))
    return replace(metadata, page_table=table, swa_page_table=overrun(metadata.swa_page_table, pages))
