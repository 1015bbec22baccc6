"""Wrong: page_table is a buffer that the builder keeps by its shape: the next build of that shape writes over it, although an overlapped pass still
has it.
"""

from dataclasses import replace

import torch
from lab.metadata import build_mha_metadata as right_metadata

BUFFERS = {}


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    table = metadata.page_table
    key = tuple(table.shape), table.device
    if key not in BUFFERS:
        while len(BUFFERS) >= 64:
            del BUFFERS[next(iter(BUFFERS))]
        BUFFERS[key] = torch.empty_like(table)
    BUFFERS[key].copy_(table)
    return replace(metadata, page_table=BUFFERS[key])
