"""Wrong: a ragged verification whose rows the host does not know gets num_tokens // batch_size as its most rows."""

from dataclasses import replace

from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or batch.extend_seq_lens_cpu or not batch.batch_size:
        return metadata
    return replace(metadata, max_seq_len_q=batch.num_tokens // batch.batch_size)
