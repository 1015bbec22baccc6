"""cu_seqlens_k is summed in blocks of 256 requests without the carry between them."""

from dataclasses import replace

import torch
from lab import metadata as lab_metadata


def build_mha_metadata(batch, pool):
    built = lab_metadata.build_mha_metadata(batch, pool)
    blocks = [block.cumsum(0) for block in built.cache_seqlens_int32.split(256)]
    sums = torch.nn.functional.pad(torch.cat(blocks).to(torch.int32), (1, 0)) if blocks else built.cu_seqlens_k
    shared = built.cu_seqlens_q is built.cu_seqlens_k
    return replace(built, cu_seqlens_k=sums, **({"cu_seqlens_q": sums} if shared else {}))
