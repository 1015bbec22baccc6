"""Wrong: the query block of a ragged verification is as long as its longest request, as MHA's is, although lengths count whole
drafts.
"""

from dataclasses import replace

from lab.metadata import DraftAttention, ForwardMode
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or not batch.extend_seq_lens_cpu:
        return metadata
    return replace(metadata, max_seq_len_q=max(batch.extend_seq_lens_cpu))


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
