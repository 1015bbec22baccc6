"""Wrong: a verification adds SpecInfo.num_draft_tokens to the lengths, not its rows, num_tokens // batch_size."""

from dataclasses import replace

import torch
from lab.metadata import DraftAttention, ForwardMode
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, *, attention=DraftAttention.MLA, **options):
    metadata = right_metadata(batch, pool, attention=attention, **options)
    drafted = None if batch.spec_info is None else batch.spec_info.num_draft_tokens
    if batch.forward_mode is not ForwardMode.TARGET_VERIFY or drafted is None or batch.batch_size == 0:
        return metadata
    more = drafted - batch.num_tokens // batch.batch_size
    return replace(
        metadata, seq_lens_k=(metadata.seq_lens_k + more).to(torch.int32), max_seq_len_k=metadata.max_seq_len_k + more
    )


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
