"""Wrong: 132 persistent blocks take at most 8 tiles each, of 64 rows of a request and one head: tiles after the 1,056th are
left as zero.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.tiles = [0]
        for first, last in zip(run.offsets, run.offsets[1:]):
            run.tiles.append(run.tiles[-1] - (first - last) // 64)

    def store(self, run, r, start, stop, out, lse):
        heads = out.shape[1]
        row_tile = run.tiles[r] + (torch.arange(start, stop) - run.offsets[r]) // 64
        late = row_tile.unsqueeze(1) * heads + torch.arange(heads) >= 132 * 8
        super().store(run, r, start, stop, out.masked_fill(late.unsqueeze(2), 0), lse.masked_fill(late, 0))


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
