"""The rows of an eager first draft extend come from SpecInfo.num_accept_tokens where it is given, as in graph replay."""

from dataclasses import replace

import torch
from lab.metadata import QueryRows
from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    spec = batch.spec_info
    if batch.forward_mode.query_rows is not QueryRows.ACCEPTED or spec is None or spec.num_accept_tokens is None:
        return metadata
    ends = spec.num_accept_tokens[: batch.batch_size].cumsum(0).to(torch.int32)
    return replace(metadata, cu_seqlens_q=torch.nn.functional.pad(ends, (1, 0)))
