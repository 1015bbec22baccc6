"""Lengths of int32 that need no offset are not copied: when the engine counts on in its tensor, the metadata's lengths change."""

from dataclasses import replace

import torch
from lab import metadata as lab_metadata

def build_mla_decode_metadata(batch, pool, attention=lab_metadata.DraftAttention.MLA):
    built = lab_metadata.build_mla_decode_metadata(batch, pool, attention)
    adds = built.max_seq_len_q > 1 or built.cu_seqlens_q is not None
    adds = adds or (batch.spec_info is not None and attention is not lab_metadata.DraftAttention.MLA)
    adds = adds or batch.forward_mode.name == "TARGET_VERIFY"
    if batch.seq_lens.dtype == torch.int32 and not adds:
        built = replace(built, seq_lens_k=batch.seq_lens)
    return built


def build_mla_metadata(batch, pool, *, attention=lab_metadata.DraftAttention.MLA, **settings):
    if batch.forward_mode.is_prefill:
        return lab_metadata.build_mla_prefill_metadata(batch, pool, **settings)
    return build_mla_decode_metadata(batch, pool, attention)


build_mla_prefill_metadata = lab_metadata.build_mla_prefill_metadata
