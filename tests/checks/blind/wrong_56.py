"""The map to sliding-window slots is copied at a pool's first build, and not again when the pool hands out or evicts pages."""

from lab import metadata as lab_metadata


_maps = {}  # pool -> its map as it was


def build_mha_metadata(batch, pool):
    if pool.full_to_swa is None:
        return lab_metadata.build_mha_metadata(batch, pool)
    while len(_maps) > 16:
        del _maps[next(iter(_maps))]
    _, stale = _maps.setdefault(id(pool), (pool, pool.full_to_swa.clone()))
    now = pool.full_to_swa
    pool.full_to_swa = stale
    try:
        return lab_metadata.build_mha_metadata(batch, pool)
    finally:
        pool.full_to_swa = now
