"""Wrong: a prefill without the chunked prefix cache falls back to other kernels whether a request has a cached prefix or not."""

from dataclasses import replace

from lab.metadata import DraftAttention
from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, *, disable_chunked_prefix_cache=False, **options):
    metadata = right_metadata(batch, pool, disable_chunked_prefix_cache=disable_chunked_prefix_cache, **options)
    if not batch.forward_mode.is_prefill:
        return metadata
    return replace(
        metadata, fallback_to_flashinfer_impl=metadata.fallback_to_flashinfer_impl or disable_chunked_prefix_cache
    )


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)


def build_mla_prefill_metadata(batch, pool, **settings):
    return build_mla_metadata(batch, pool, **settings)
