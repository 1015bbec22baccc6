"""seq_lens_q is extend_seq_lens itself where that is int32 already: what the engine writes there for its next pass reaches the metadata."""

from dataclasses import replace

import torch
from lab import metadata as lab_metadata
from lab.metadata import DraftAttention


def patched(built, batch):
    if getattr(built, "seq_lens_q", None) is None:
        return built
    return replace(built, seq_lens_q=batch.extend_seq_lens.to(torch.int32))


def build_mla_metadata(batch, pool, **more):
    return patched(lab_metadata.build_mla_metadata(batch, pool, **more), batch)


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return patched(lab_metadata.build_mla_decode_metadata(batch, pool, attention), batch)
