"""Wrong: a prefill in a graph falls back to other kernels only where a request has a cached prefix; it should always.
"""

from dataclasses import replace

from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, *, in_prefill_graph=False, **options):
    metadata = right_metadata(batch, pool, in_prefill_graph=in_prefill_graph, **options)
    if not batch.forward_mode.is_prefill:
        return metadata
    has_prefix = any(batch.extend_prefix_lens_cpu)
    fallback = has_prefix and metadata.fallback_to_flashinfer_impl
    return replace(metadata, fallback_to_flashinfer_impl=fallback)


def build_mla_prefill_metadata(batch, pool, *, disable_chunked_prefix_cache=False, in_prefill_graph=False):
    return build_mla_metadata(
        batch, pool, disable_chunked_prefix_cache=disable_chunked_prefix_cache, in_prefill_graph=in_prefill_graph
    )
