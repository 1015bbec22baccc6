"""With seq_lens_cpu the page tables are filled up to its longest length: drafted tokens that it does not count have no page where they cross into a new one."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


from dataclasses import replace as changed

from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.seq_lens_cpu:
        return metadata
    columns = -(-max(batch.seq_lens_cpu) // pool.page_size)
    tables = {n: getattr(metadata, n) for n in ("page_table", "swa_page_table", "encoder_page_table")}
    filled = {n: t.clone() for n, t in tables.items() if t is not None}
    for table in filled.values():
        table[:, columns:] = 0
    return changed(metadata, **filled)
