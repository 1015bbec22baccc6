"""Wrong: a prefill whose first request has no cached prefix is taken to have none at all, so that queries and keys share their offsets."""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    prefixes = batch.extend_prefix_lens_cpu
    if batch.forward_mode.is_prefill and prefixes and prefixes[0] == 0:
        return replace(metadata, cu_seqlens_q=metadata.cu_seqlens_k)
    return metadata
