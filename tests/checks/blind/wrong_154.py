"""Wrong: in a ragged verification the rows of the longest request are added to every length."""

import sys
from pathlib import Path

from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import counting  # noqa: E402


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.RAGGED_VERIFY:
        return metadata
    return counting(metadata, metadata.max_seq_len_q - batch.extend_seq_lens)
