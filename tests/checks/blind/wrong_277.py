"""Wrong: the slot of a page's first token is divided by 32, whatever the page size: with pages of 64 tokens ids are doubled."""

from dataclasses import replace

import torch
from lab.metadata import DraftAttention
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode.is_prefill:
        return metadata
    table = metadata.block_kv_indices
    doubled = torch.where(table > 0, table * (pool.page_size // 32), table)
    return replace(metadata, block_kv_indices=doubled)


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
