"""Wrong: a cluster has four K/V heads; the results of a further cluster's, of the query heads of K/V head 4 and on, come out
half a percent too large.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        if run.num_kv_heads > 4:
            out = out.clone()
            out[:, 4 * run.group :] *= 1.005
        super().store(run, r, start, stop, out, lse)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
