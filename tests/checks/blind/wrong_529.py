"""The block table ends (-1) at a request's own last page: pages that only its padding rows read do not name the sink."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


from dataclasses import replace as changed

from lab.metadata import DraftAttention, build_mla_prefill_metadata
from lab.metadata import build_mla_decode_metadata as right_metadata


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    metadata = right_metadata(batch, pool, attention)
    if metadata.seq_lens_q is None:
        return metadata
    own = metadata.seq_lens_k - metadata.max_seq_len_q + metadata.seq_lens_q
    pages = (own + pool.page_size - 1) // pool.page_size
    table = metadata.block_kv_indices
    return changed(metadata, block_kv_indices=table.masked_fill(torch.arange(table.shape[1]) >= pages[:, None], -1))


def build_mla_metadata(batch, pool, *, attention=DraftAttention.MLA, **options):
    if batch.forward_mode.is_prefill:
        return build_mla_prefill_metadata(batch, pool, **options)
    return build_mla_decode_metadata(batch, pool, attention)
