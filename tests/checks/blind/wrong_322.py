"""Wrong: rows and the heads of a group are packed in tiles of 64, whose sinks are found by the place in the tile modulo the group: from
the second tile on that is right only where the group divides 64.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def sink_rows(self, run, r, position):
        if run.sinks is None:
            return None
        row = position - (run.lens[r] - (run.offsets[r + 1] - run.offsets[r]))
        head = torch.arange(run.p.num_qo_heads)
        place = (row.unsqueeze(1) * run.group + head % run.group) % 64
        return run.sinks[head // run.group * run.group + place % run.group]


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
