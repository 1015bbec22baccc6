"""Wrong: a request without rows in a draft extend or a ragged verification is counted with one row in seq_lens_q and cu_seqlens_q, as a grid needs one
block at least.
"""

from dataclasses import replace

from lab.metadata import DraftAttention
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, *, attention=DraftAttention.MLA, **options):
    metadata = right_metadata(batch, pool, attention=attention, **options)
    if batch.forward_mode.is_prefill or metadata.seq_lens_q is None:
        return metadata
    rows = metadata.seq_lens_q.clamp(min=1)
    boundaries = metadata.cu_seqlens_q.clone()
    boundaries[1:] = rows.cumsum(0)
    return replace(metadata, seq_lens_q=rows, cu_seqlens_q=boundaries)


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
