"""Wrong: of a verification on encoder-only layers each row gets the keys up to its own, not all keys of its request."""

from dataclasses import replace

import torch
from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    lens, q_len = metadata.encoder_cache_seqlens, metadata.max_seq_len_q
    if lens is None:
        return metadata
    row = torch.arange(len(lens), dtype=torch.int32, device=lens.device) % q_len
    return replace(metadata, encoder_cache_seqlens=lens - (q_len - 1) + row)
