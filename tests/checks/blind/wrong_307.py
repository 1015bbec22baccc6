"""Wrong: a block takes two heads, and there are num_qo_heads // 2 of them: the last one of an odd number is left as zero.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        if run.p.num_qo_heads % 2:
            out[:, -1], lse[:, -1] = 0.0, -math.inf
        super().store(run, r, start, stop, out, lse)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
