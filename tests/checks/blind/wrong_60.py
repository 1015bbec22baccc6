"""A draft step that counts its tokens (MLA_WITH_OFFSET) lengthens seq_lens_k, but the table is filled from seq_lens: the page of a draft token that crosses a page's end is missing."""

from dataclasses import replace

import torch
from lab import metadata as lab_metadata
from lab.metadata import DraftAttention, ForwardMode


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    built = lab_metadata.build_mla_decode_metadata(batch, pool, attention)
    if batch.forward_mode in (ForwardMode.DECODE, ForwardMode.IDLE) and batch.spec_info is not None:
        pages = (batch.seq_lens + pool.page_size - 1) // pool.page_size
        dead = torch.arange(built.block_kv_indices.shape[1], device=pages.device) >= pages.unsqueeze(1)
        built = replace(built, block_kv_indices=built.block_kv_indices.masked_fill(dead, -1))
    return built


def build_mla_metadata(batch, pool, *, attention=DraftAttention.MLA, **prefill):
    if batch.forward_mode.is_prefill:
        return lab_metadata.build_mla_metadata(batch, pool, attention=attention, **prefill)
    return build_mla_decode_metadata(batch, pool, attention)
