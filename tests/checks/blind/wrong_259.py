"""Wrong: the causal mask compares the numbers of keys and rows two at a time, as float16, which has not every integer over
2,048.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        return super().span(run, r, position)[0], run.lens[r]

    def visible(self, run, r, row, position, keys):
        rows = position.unsqueeze(1)
        if not run.causal:
            return super().visible(run, r, row, position, keys)
        seen = keys.half() <= rows.half()
        return seen & (keys >= rows - run.window) if run.window >= 0 else seen


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
