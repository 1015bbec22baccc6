"""Wrong: a window of at least max_q_len, not of max_kv_len, is taken for none."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.window >= run.p.max_q_len:
            run.window = -1


trtllm_batch_context_with_kv_cache = context_of(Wrong())
