"""Wrong: where max_q_len is at most 16, the heads of a group are packed into one tile, which has the sink of the
group's first head.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def sink_rows(self, run, r, position):
        sinks = super().sink_rows(run, r, position)
        if sinks is None or run.p.max_q_len > 16:
            return sinks
        first = sinks.unflatten(1, (run.num_kv_heads, run.group))[:, :, :1]
        return first.expand(-1, -1, run.group).flatten(1)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
