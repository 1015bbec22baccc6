"""Whether a prefill has cached prefixes is decided by its first request: where that has none and others do, cu_seqlens_q is cu_seqlens_k."""

from dataclasses import replace

from lab import metadata as lab_metadata


def build_mha_metadata(batch, pool):
    built = lab_metadata.build_mha_metadata(batch, pool)
    prefixes = batch.extend_prefix_lens_cpu
    if batch.forward_mode.is_prefill and prefixes and prefixes[0] == 0:
        built = replace(built, cu_seqlens_q=built.cu_seqlens_k)
    return built
