"""Wrong: sum_seq_lens_q of a ragged verification leaves out its rows of padding, so that their output does not become zero."""

from dataclasses import replace

from lab.metadata import DraftAttention, ForwardMode
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or batch.extend_seq_lens_cpu is None:
        return metadata
    return replace(metadata, sum_seq_lens_q=sum(batch.extend_seq_lens_cpu))


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
