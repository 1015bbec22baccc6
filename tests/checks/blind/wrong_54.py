"""Rows of padding write to the last request's window slot: swa_out_cache_loc is padded with its last entry, not with the sink."""

from lab import metadata as lab_metadata


def build_mha_metadata(batch, pool):
    built = lab_metadata.build_mha_metadata(batch, pool)
    locations, n = built.swa_out_cache_loc, batch.out_cache_loc.shape[0]
    if locations is not None and 0 < n < batch.num_tokens:
        locations[n:] = locations[n - 1]
    return built
