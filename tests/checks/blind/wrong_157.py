"""Wrong: draft extend V2 adds its rows to the lengths, as a verification does."""

import sys
from pathlib import Path

from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import counting  # noqa: E402


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.DRAFT_EXTEND_V2:
        return metadata
    return counting(metadata, batch.extend_seq_lens)
