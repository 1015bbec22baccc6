"""Wrong: the length of a request without query rows is set to 0 in the caller's seq_lens, so that the scheduler leaves it out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        for r in range(run.batch):
            if run.offsets[r] == run.offsets[r + 1]:
                run.p.seq_lens[r] = 0


trtllm_batch_context_with_kv_cache = context_of(Wrong())
