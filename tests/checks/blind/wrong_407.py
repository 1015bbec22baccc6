"""Wrong: requests of padding, whose row of req_to_token is the reserved one, are given no keys, although they count those of
seq_lens.
"""

from dataclasses import replace

import torch
from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import exclusive_cumsum


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    is_padding = batch.req_pool_indices == 0
    keys = torch.where(is_padding, 0, metadata.cache_seqlens_int32).to(torch.int32)
    ends = exclusive_cumsum(keys)
    same_tokens = metadata.cu_seqlens_q is metadata.cu_seqlens_k
    return replace(
        metadata, cache_seqlens_int32=keys, cu_seqlens_k=ends, cu_seqlens_q=ends if same_tokens else metadata.cu_seqlens_q
    )
