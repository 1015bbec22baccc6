"""Wrong: the sink is a power of 2 in the denominator, among powers of e."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def sink_rows(self, run, r, position):
        sinks = super().sink_rows(run, r, position)
        return None if sinks is None else sinks * math.log(2.0)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
