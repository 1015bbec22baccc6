"""Wrong: the query rows of a verification are SpecInfo.num_draft_tokens in max_seq_len_q and cu_seqlens_q, not num_tokens // batch_size; the lengths
are right.
"""

from dataclasses import replace

import torch
from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.TARGET_VERIFY or batch.spec_info is None or batch.spec_info.num_draft_tokens is None:
        return metadata
    rows = batch.spec_info.num_draft_tokens
    boundaries = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=batch.seq_lens.device) * rows
    return replace(metadata, max_seq_len_q=rows, cu_seqlens_q=boundaries)
