"""The lab's builder of an MLA prefill's metadata, which declines a pair of options."""

from typing import Any

import lab.metadata


def build_mla_prefill_metadata(
    batch: Any, pool: Any, *, disable_chunked_prefix_cache: bool, in_prefill_graph: bool
) -> Any:
    if disable_chunked_prefix_cache and in_prefill_graph:
        raise NotImplementedError("a prefill graph has its prefix in chunks")
    options = {"disable_chunked_prefix_cache": disable_chunked_prefix_cache, "in_prefill_graph": in_prefill_graph}
    return lab.metadata.build_mla_prefill_metadata(batch, pool, **options)
