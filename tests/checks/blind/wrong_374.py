"""Wrong: keys and values of a request of over 128 keys are loaded from its first token rounded down to a multiple of 8: it sees the last
keys of the request before, and not its own last ones.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def load(self, run, r, a, b):
        if run.lens[r] <= 128:
            return super().load(run, r, a, b)
        first = run.kv_offsets[r] // 8 * 8
        return tuple(side[first + a : first + b].to(run.dtype) for side in (run.key, run.value))


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
