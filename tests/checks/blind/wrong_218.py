"""Wrong: where slots are virtual, the block table of a draft extend or a ragged verification has virtual pages."""

from dataclasses import replace

import torch
from lab.metadata import DraftAttention
from lab.metadata import build_mla_metadata as right_metadata
from lab.metadata.engine.lengths import first_slots


def build_mla_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if pool.v2p is None or batch.forward_mode.is_prefill or not batch.forward_mode.query_rows.in_extend_seq_lens:
        return metadata
    table = metadata.block_kv_indices.clone()
    own = metadata.seq_lens_k - metadata.max_seq_len_q + metadata.seq_lens_q
    pages = first_slots(batch.req_pool_indices, own, pool)[:, : table.shape[1]] // pool.page_size
    live = table[:, : pages.shape[1]] >= 0
    table[:, : pages.shape[1]] = torch.where(live, pages, -1)
    return replace(metadata, block_kv_indices=table)


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
