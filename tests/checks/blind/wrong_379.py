"""Wrong: where the host has the lengths, max_seq_len of a prefill is the longest of them, cached prefix and all, not the most new tokens.
"""

from dataclasses import replace

from lab.metadata import build_mla_metadata as right_metadata


def build_mla_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.forward_mode.is_prefill or not batch.seq_lens_cpu:
        return metadata
    return replace(metadata, max_seq_len=max(batch.seq_lens_cpu))


def build_mla_prefill_metadata(batch, pool, *, disable_chunked_prefix_cache=False, in_prefill_graph=False):
    return build_mla_metadata(
        batch, pool, disable_chunked_prefix_cache=disable_chunked_prefix_cache, in_prefill_graph=in_prefill_graph
    )
