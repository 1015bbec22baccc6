"""Wrong: where slots are virtual, a live page that v2p has none for is -1 in the block table, not the sink."""

from dataclasses import replace

import torch
from lab.metadata import DraftAttention
from lab.metadata import build_mla_metadata as right_metadata
from lab.metadata.engine.lengths import first_slots, key_lens, num_pages


def build_mla_metadata(batch, pool, *, attention=DraftAttention.MLA, **options):
    metadata = right_metadata(batch, pool, attention=attention, **options)
    if batch.forward_mode.is_prefill or pool.v2p is None:
        return metadata
    keys = key_lens(batch, attention)
    width = min(metadata.block_kv_indices.shape[1], pool.block_table_width)
    page = first_slots(batch.req_pool_indices, keys, pool)[:, :width].long() // pool.page_size
    live = torch.arange(width) < num_pages(keys, pool.page_size).unsqueeze(1)
    none = live & ((page < 0) | (pool.v2p[page.clamp(min=0)] < 0))
    table = metadata.block_kv_indices.clone()
    table[:, :width].masked_fill_(none, -1)
    return replace(metadata, block_kv_indices=table)


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
