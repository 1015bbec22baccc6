"""Wrong: where the host has the lengths, the block table of a verification is made wide enough for them alone, without
the draft tokens.
"""

from dataclasses import replace

from lab.metadata import DraftAttention, ForwardMode
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.TARGET_VERIFY or not batch.seq_lens_cpu:
        return metadata
    width = -(-max(batch.seq_lens_cpu) // 4096) * (4096 // pool.page_size)
    return replace(metadata, block_kv_indices=metadata.block_kv_indices[:, :width].contiguous())


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
