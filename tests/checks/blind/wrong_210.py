"""Wrong: where the host has the lengths, max_seq_len_q of a prefill is the longest of them, cached prefix and all."""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.forward_mode.is_prefill or not batch.seq_lens_cpu:
        return metadata
    return replace(metadata, max_seq_len_q=max(batch.seq_lens_cpu))
