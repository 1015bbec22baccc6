"""Lengths are scattered by the request's row of the pool to count the pages: where a request is twice in a batch, both get as many pages as the later one."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


from dataclasses import replace as changed

from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import first_slots


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    by_row = torch.zeros(pool.req_to_token.shape[0], dtype=torch.int32)
    for row, keys in zip(batch.req_pool_indices.tolist(), metadata.cache_seqlens_int32.tolist()):
        by_row[row] = keys
    slots = first_slots(batch.req_pool_indices, by_row[batch.req_pool_indices.long()], pool)
    tables = dict(page_table=pool.pages(slots))
    if metadata.swa_page_table is not None:
        tables["swa_page_table"] = (pool.swa_slots(slots) // pool.page_size).to(torch.int32)
    if metadata.encoder_page_table is not None:
        tables["encoder_page_table"] = tables["page_table"].repeat_interleave(metadata.max_seq_len_q, dim=0)
    return changed(metadata, **tables)
