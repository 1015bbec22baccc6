"""The lengths are converted with .to(torch.int32), which copies nothing of int32 ones: the metadata follows the batch's tensor when it is rewritten."""

from dataclasses import replace

import torch
from lab import metadata as lab_metadata
from lab.metadata.engine.lengths import uncounted_tokens


def build_mha_metadata(batch, pool):
    built = lab_metadata.build_mha_metadata(batch, pool)
    if uncounted_tokens(batch) == 0:
        built = replace(built, cache_seqlens_int32=batch.seq_lens.to(torch.int32))
    return built
