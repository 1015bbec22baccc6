"""Wrong: the block table of a padded draft extend ends with the pages of a request's own tokens: -1 stands where padded
queries look.
"""

from dataclasses import replace

import torch
from lab.metadata import DraftAttention, ForwardMode
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.DRAFT_EXTEND:
        return metadata
    own = metadata.seq_lens_k - metadata.max_seq_len_q + metadata.seq_lens_q
    pages = -(-own // pool.page_size)
    columns = torch.arange(metadata.block_kv_indices.shape[1])
    table = metadata.block_kv_indices.masked_fill(columns >= pages.unsqueeze(1), -1)
    return replace(metadata, block_kv_indices=table)


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
