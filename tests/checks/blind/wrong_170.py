"""Wrong: the persistent loop over requests ends at one without keys, where it should go on with the next."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def solve(self, run):
        self.start(run)
        run.out.zero_()
        if run.lse is not None:
            run.lse.fill_(-math.inf)
        for r in range(run.batch):
            self.request(run, r)
            if run.lens[r] == 0:
                break


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
