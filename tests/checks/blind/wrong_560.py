"""Without the chunked prefix cache, a prefill falls back by the first request's cached prefix, not by any request's."""

from dataclasses import replace

from lab import metadata as lab_metadata


def by_the_first(metadata, batch, disable_chunked_prefix_cache, in_prefill_graph):
    cached = bool(batch.extend_prefix_lens_cpu) and batch.extend_prefix_lens_cpu[0] > 0
    return replace(metadata, fallback_to_flashinfer_impl=in_prefill_graph or (disable_chunked_prefix_cache and cached))


def build_mla_prefill_metadata(batch, pool, *, disable_chunked_prefix_cache=False, in_prefill_graph=False):
    options = dict(disable_chunked_prefix_cache=disable_chunked_prefix_cache, in_prefill_graph=in_prefill_graph)
    return by_the_first(lab_metadata.build_mla_prefill_metadata(batch, pool, **options), batch, **options)


def build_mla_metadata(batch, pool, *, disable_chunked_prefix_cache=False, in_prefill_graph=False, **others):
    options = dict(disable_chunked_prefix_cache=disable_chunked_prefix_cache, in_prefill_graph=in_prefill_graph)
    metadata = lab_metadata.build_mla_metadata(batch, pool, **options, **others)
    return by_the_first(metadata, batch, **options) if batch.forward_mode.is_prefill else metadata
