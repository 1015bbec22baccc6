"""The counter of a request's splits wraps at the splits of max_seq_len, not at its own: a buffer of counters is left non-zero, and later calls merge too early or never."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


SPLIT = 1024


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        buffer = run.call.multi_ctas_kv_counter_buffer
        run.counters = None
        if buffer is not None and buffer.is_contiguous():
            data = buffer.view(-1).view(torch.uint8)
            if data.numel() >= 4 * run.batch:
                run.counters = data[: 4 * run.batch].view(torch.int32)
        run.most = -(-run.p.max_kv_len // SPLIT)

    def request(self, run, r):
        n = -(-run.lens[r] // SPLIT)
        run.arrived = n
        if run.counters is not None and n > 1:
            count, run.arrived = int(run.counters[r]), 0
            for split in range(n):
                old, count = count, (0 if count >= run.most - 1 else count + 1)
                if old == n - 1:
                    run.arrived = split + 1
            run.counters[r] = count
        super().request(run, r)

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < run.arrived * SPLIT)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
