"""Wrong: the scheduler's list of row tiles is kept by the numbers of requests and rows and by max_q_len: of a later batch that
has the same ones, but its rows dealt to requests in another way, it is the first one's.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def __init__(self):
        self.plans = {}

    def start(self, run):
        super().start(run)
        key = run.batch, run.p.num_rows, run.p.max_q_len
        if key not in self.plans and len(self.plans) >= 256:
            del self.plans[next(iter(self.plans))]
        run.offsets = self.plans.setdefault(key, run.offsets)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
