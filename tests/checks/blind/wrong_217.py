"""Wrong: the block table is filled 4,096 tokens at a time; a later block begins at its first page's number in req_to_token, not at
its first token.
"""

from dataclasses import replace

import torch
from lab.metadata import DraftAttention
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode.is_prefill:
        return metadata
    table, pages_of_block = metadata.block_kv_indices, 4096 // pool.page_size
    columns = torch.arange(table.shape[1], device=table.device)
    first = columns // pages_of_block * pages_of_block + columns % pages_of_block * pool.page_size
    slots = pool.req_to_token[:, first.clamp(max=pool.max_context_len - 1)].index_select(0, batch.req_pool_indices)
    late = (columns >= pages_of_block) & (table > 0)
    return replace(metadata, block_kv_indices=torch.where(late, pool.pages(slots), table))


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
