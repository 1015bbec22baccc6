"""Wrong: of a tile of 128 rows the second warp group, rows 64 and on, takes the LSE of its sums before the last tile of 64
keys is in them.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        q_len = run.offsets[r + 1] - run.offsets[r]
        prefix = run.lens[r] - q_len
        row = position - prefix
        last_row = (row // 128 * 128 + 127).clamp(max=q_len - 1)
        end = (prefix + last_row + 1).clamp(min=0) if run.causal else torch.full_like(row, run.lens[r])
        before = (first_key + torch.arange(len(keys))) < ((end - 1) // 64 * 64).unsqueeze(1)
        part = self.partial(run, r, query, keys, values, seen & before, first_key)
        _, early = self.finish(run, part, sinks)
        return out, torch.where((row % 128 >= 64).unsqueeze(1), early, lse)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
