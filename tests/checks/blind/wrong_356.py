"""Wrong: the request of a row is row * (1024 // q_len_per_req + 1) >> 10 where q_len_per_req is no power of two: in large batches the last
row of a request becomes the next one's.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def solve(self, run):
        super().solve(run)
        q_len = run.p.max_q_len
        if run.p.cu_seqlens_q is not None or q_len & (q_len - 1) == 0 or q_len > 512:
            return
        for row in range(run.offsets[-1]):
            r = min(row * (1024 // q_len + 1) >> 10, run.batch - 1)
            if r != row // q_len:
                self.one_row(run, r, row)

    def one_row(self, run, r, row):
        at = torch.tensor([row - run.offsets[r]])
        position = self.positions(run, r, at)
        a, b = self.span(run, r, position)
        keys, values = self.load(run, r, a, b)
        query = index(run.query, slice(row, row + 1)).to(run.dtype)
        seen = self.visible(run, r, at.clamp(0, run.p.max_q_len - 1), position, torch.arange(a, b))
        out, lse = self.attend(run, r, query, keys, values, seen, self.sink_rows(run, r, position), position, a)
        self.store(run, r, row, row + 1, out, lse)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
