"""Wrong: the sinks are multiplied by log2(e) into memory of the kernel's own once per buffer, and not again when the buffer is rewritten.
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
        if run.p.sinks is not None:
            run.sinks = self.memory.of(run.p.sinks, run.p.sinks.clone).to(run.dtype)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
