"""Wrong: with enable_pdl=True the lengths are loaded before the wait for the kernel that writes them: they are those of the call before on
that buffer.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def __init__(self):
        self.memory = Memory()

    def start(self, run):
        super().start(run)
        kept = self.memory.of(run.p.seq_lens, lambda: [run.lens])
        if run.call.enable_pdl:
            capacity = run.k_table.shape[1] * run.page_size
            run.now, run.lens = run.lens, [min(n, capacity) for n in kept[0]]
            kept[0] = run.now
        else:
            kept[0] = run.lens

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, len(run.k_cache) - 1)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
