"""A ragged verification: sum_seq_lens_q is the sum of the requests' rows, without the padding that the pass has besides."""

from dataclasses import replace

from lab import metadata as lab_metadata
from lab.metadata import DraftAttention, ForwardMode


def patched(built, batch):
    if batch.forward_mode is ForwardMode.RAGGED_VERIFY and batch.extend_seq_lens_cpu is not None:
        return replace(built, sum_seq_lens_q=sum(batch.extend_seq_lens_cpu))
    return built


def build_mla_metadata(batch, pool, **more):
    return patched(lab_metadata.build_mla_metadata(batch, pool, **more), batch)


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return patched(lab_metadata.build_mla_decode_metadata(batch, pool, attention), batch)
