"""The rows of a ragged verification are padded to the batch's longest request, not to SpecInfo.num_draft_tokens."""

from dataclasses import replace

from lab import metadata as lab_metadata
from lab.metadata import QueryRows


def padded_to_longest(batch):
    if batch.forward_mode.query_rows is not QueryRows.VERIFIED or not batch.extend_seq_lens_cpu:
        return batch
    most = max(1, max(batch.extend_seq_lens_cpu))
    return replace(batch, spec_info=replace(batch.spec_info, num_draft_tokens=most))


def build_mla_decode_metadata(batch, pool, *arguments, **options):
    return lab_metadata.build_mla_decode_metadata(padded_to_longest(batch), pool, *arguments, **options)


def build_mla_metadata(batch, pool, **options):
    return lab_metadata.build_mla_metadata(padded_to_longest(batch), pool, **options)
