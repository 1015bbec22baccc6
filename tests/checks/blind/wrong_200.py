"""Wrong: with a window, a tile of 64 rows begins at the first tile of 64 keys that lies in its first row's window whole."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.window < 0:
            return seen
        first_row = position - row % 64
        first = -(-(first_row - run.window).clamp(min=0) // 64) * 64
        return seen & (keys >= first.unsqueeze(1))


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
