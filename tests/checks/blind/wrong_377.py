"""Wrong: the tokens that a draft step or a verification adds are added in place to .to(torch.int32) of the lengths, which copies nothing of
int32 ones: the metadata is right, but the batch's lengths have grown.
"""

import torch
from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.seq_lens.dtype == torch.int32:
        batch.seq_lens.copy_(metadata.cache_seqlens_int32)
    return metadata
