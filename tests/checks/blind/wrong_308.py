"""Wrong: where a request's cached keys are a multiple of 128, a tile of 128 rows ends before the tile of keys on the diagonal.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        cached = run.lens[r] - (run.offsets[r + 1] - run.offsets[r])
        if not run.causal or cached <= 0 or cached % 128:
            return seen
        return seen & (keys < (cached + row // 128 * 128).unsqueeze(1))


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
