"""Wrong: the kernel for is_causal=False bounds its walk over tiles of 128 keys by max_q_len, as the causal one's table of bounds
has it for new tokens.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, end if run.causal else min(end, -(-run.p.max_q_len // 128) * 128)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
