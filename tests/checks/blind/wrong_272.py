"""Wrong: in a mixed batch the decoding requests (the last ones, of one new token) get that token added to their lengths."""

import sys
from itertools import takewhile
from pathlib import Path

import torch
from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import counting  # noqa: E402


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.MIXED:
        return metadata
    decoding = len(list(takewhile(lambda rows: rows == 1, reversed(batch.extend_seq_lens_cpu))))
    number = torch.arange(batch.batch_size, device=batch.seq_lens.device)
    return counting(metadata, (number >= batch.batch_size - decoding).int())
