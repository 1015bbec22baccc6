"""Wrong: an eager draft extend takes its rows in cu_seqlens_q from SpecInfo.num_accept_tokens where it is given, as the replay of a graph
does, not from extend_seq_lens.
"""

from dataclasses import replace

from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.DRAFT_EXTEND or batch.spec_info is None or batch.spec_info.num_accept_tokens is None:
        return metadata
    boundaries = metadata.cu_seqlens_q.clone()
    boundaries[1:] = batch.spec_info.num_accept_tokens[: batch.batch_size].cumsum(0)
    return replace(metadata, cu_seqlens_q=boundaries)
