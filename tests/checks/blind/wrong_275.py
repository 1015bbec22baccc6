"""Wrong: max_seq_len_q of a prefill is the most rows of the requests before the last ones with one new token each, which go to
the decode kernel: 0 if there are no others.
"""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.forward_mode.is_prefill or metadata.max_seq_len_q != 1:
        return metadata
    return replace(metadata, max_seq_len_q=0)
