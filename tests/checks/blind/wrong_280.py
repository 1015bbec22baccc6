"""Wrong: a ragged verification whose requests verify as many rows each is a view, as a draft extend is, although its blocks
have num_draft_tokens rows.
"""

from dataclasses import replace

from lab.metadata import DraftAttention, ForwardMode, QueryLayout
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    rows = batch.extend_seq_lens_cpu
    if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or not rows or len(set(rows)) > 1:
        return metadata
    return replace(metadata, query_layout=QueryLayout.VIEW)


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
