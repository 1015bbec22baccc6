"""Wrong: only a prefill with cached prefixes has its own cu_seqlens_q: a draft extend, which has none, gets cu_seqlens_k."""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.forward_mode.extends_draft or any(batch.extend_prefix_lens_cpu or ()):
        return metadata
    return replace(metadata, cu_seqlens_q=metadata.cu_seqlens_k)
