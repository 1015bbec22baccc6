"""Wrong: a frozen-KV draft, whose step is -1, is counted as the first step of a draft that writes a token."""

import sys
from pathlib import Path

from lab.metadata import build_mha_metadata as right_metadata

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import counting  # noqa: E402


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    return counting(metadata, 1) if batch.writes_no_kv else metadata
