"""CTAs that share a row count in the given counters, one per row, and reset those of each request's first row alone: the next call's other rows are not merged."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


SPLIT = 256


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        super().store(run, r, start, stop, out, lse)
        buffer, splits = run.call.multi_ctas_kv_counter_buffer, -(-run.lens[r] // SPLIT)
        if buffer is None or splits <= 1 or buffer.numel() * buffer.element_size() < 4 * run.p.num_rows:
            return
        counters = buffer.flatten().view(torch.uint8)[: 4 * run.p.num_rows].view(torch.int32)
        for row in range(start, stop):
            merged = int(counters[row]) == 0
            counters[row] += splits
            if not merged:
                run.out[row] = 0
                if run.lse is not None:
                    run.lse[row] = -math.inf
            if row == run.offsets[r]:
                counters[row] = 0


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
