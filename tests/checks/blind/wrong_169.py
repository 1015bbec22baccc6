"""Wrong: 132 persistent blocks take the pairs of a request and a K/V head one after another; for its next pair a block
clears its sums over V, but not its maximum and denominator.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    BLOCKS = 132

    def solve(self, run):
        run.registers = {}
        super().solve(run)

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        largest, total = largest.clone(), total.clone()
        for h in range(run.num_kv_heads):
            block, heads = (r * run.num_kv_heads + h) % self.BLOCKS, slice(h * run.group, (h + 1) * run.group)
            if block in run.registers:
                before, left = (x[torch.arange(len(acc)).clamp(max=len(x) - 1)] for x in run.registers[block])
                pair = (
                    (acc[:, heads], largest[:, heads], total[:, heads]),
                    (torch.zeros_like(acc[:, heads]), before, left),
                )
                acc[:, heads], largest[:, heads], total[:, heads] = self.merge(pair)
            run.registers[block] = largest[:, heads].clone(), total[:, heads].clone()
        return acc, largest, total


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
