"""A draft extend with different widths keeps seq_lens as the keys: they do not count the rows that pad a request to the longest."""

from dataclasses import replace

import torch
from lab import metadata as lab_metadata
from lab.metadata import DraftAttention


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    built = lab_metadata.build_mla_decode_metadata(batch, pool, attention)
    if batch.forward_mode.extends_draft:
        built = replace(built, seq_lens_k=batch.seq_lens.to(torch.int32).clone())
    return built


def build_mla_metadata(batch, pool, *, attention=DraftAttention.MLA, **prefill):
    if batch.forward_mode.is_prefill:
        return lab_metadata.build_mla_metadata(batch, pool, attention=attention, **prefill)
    return build_mla_decode_metadata(batch, pool, attention)
