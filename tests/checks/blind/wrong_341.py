"""Wrong: tiles of 64 keys are walked four at a time; of three that are left over two are done.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        tiles = -(-(end - start) // 64)
        return start, start + (tiles - 1) * 64 if tiles % 4 == 3 else end


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
