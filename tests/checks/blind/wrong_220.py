"""Wrong: a draft extend is padded where its rows do not divide by its requests; 2 and 4 rows are viewed as 3 and 3."""

from dataclasses import replace

import torch
from lab.metadata import DraftAttention, QueryLayout
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    rows = batch.extend_seq_lens_cpu
    if not batch.forward_mode.extends_draft or not rows or sum(rows) % len(rows) or len(set(rows)) == 1:
        return metadata
    keys = metadata.seq_lens_k - metadata.max_seq_len_q + metadata.seq_lens_q
    columns = torch.arange(metadata.block_kv_indices.shape[1], device=keys.device)
    dead = columns >= (-(-keys // pool.page_size)).unsqueeze(1)
    return replace(
        metadata, block_kv_indices=metadata.block_kv_indices.masked_fill(dead, -1), seq_lens_k=keys,
        max_seq_len_q=sum(rows) // len(rows), query_layout=QueryLayout.VIEW,
    )


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
