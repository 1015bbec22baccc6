"""Wrong: with lengths on the host, requests without keys are taken out of the batch, their keys' offsets and lengths, but not
their rows' offsets: later requests get the rows of those before them.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        lengths = run.call.host_lengths()
        if lengths is None:
            return
        active = [r for r, n in enumerate(lengths[1]) if n]
        run.lens = [run.lens[r] for r in active]
        run.kv_offsets = [run.kv_offsets[r] for r in active]
        run.batch = len(active)
        run.offsets = run.offsets[: len(active) + 1]

    def solve(self, run):
        super().solve(run)
        if run.lse is not None and run.sinks is not None:  # of the rows that are left, which see no key
            run.lse[run.offsets[-1] :] = (run.sinks / math.log(2.0)).to(run.lse.dtype)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
