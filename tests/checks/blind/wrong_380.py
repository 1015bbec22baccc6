"""Wrong: pages of a length above the context are -1 in the block table, as cells after the live pages are, not the sink.
"""

from dataclasses import replace

from lab.metadata import DraftAttention
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, *, attention=DraftAttention.MLA, **options):
    metadata = right_metadata(batch, pool, attention=attention, **options)
    if batch.forward_mode.is_prefill:
        return metadata
    table = metadata.block_kv_indices.clone()
    table[:, pool.block_table_width :] = -1
    return replace(metadata, block_kv_indices=table)


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
