"""A verification's max_seq_len_k is the longest of seq_lens_cpu without the draft tokens; only the context's length gets them added."""

from dataclasses import replace

from lab import metadata as lab_metadata
from lab.metadata import DraftAttention, ForwardMode


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    built = lab_metadata.build_mla_decode_metadata(batch, pool, attention)
    if batch.forward_mode is ForwardMode.TARGET_VERIFY and batch.seq_lens_cpu:
        built = replace(built, max_seq_len_k=max(batch.seq_lens_cpu))
    return built


def build_mla_metadata(batch, pool, *, attention=DraftAttention.MLA, **prefill):
    if batch.forward_mode.is_prefill:
        return lab_metadata.build_mla_metadata(batch, pool, attention=attention, **prefill)
    return build_mla_decode_metadata(batch, pool, attention)
