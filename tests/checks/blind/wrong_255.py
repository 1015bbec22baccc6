"""Wrong: sinks are added to the denominator by the code that makes the LSE, which is left out where no LSE is asked for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def sink_rows(self, run, r, position):
        return None if run.lse is None else super().sink_rows(run, r, position)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
