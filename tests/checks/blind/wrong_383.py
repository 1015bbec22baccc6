"""Wrong: page ids are staged for 32 columns in view; K runs a page ahead of V, and the ids of the next 32 overwrite those
before V's page of the 32nd column is loaded, so that its id is that of the column 32 later (of the last one, where the
table's live columns end before).
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        if side == "v" and len(columns) > 32:
            at = torch.arange(len(columns))
            late = (at % 32 == 31) & (at < len(columns) - 1)
            columns = columns[torch.where(late, (at + 32).clamp(max=len(columns) - 1), at)]
        return super().pages_of(run, r, columns, side)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
