"""Wrong: where max_q_len is max_kv_len, queries and keys are taken to be the same tokens, and cum_seq_lens_q serves
both.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        p = run.p
        if p.max_q_len == p.max_kv_len and len(run.key) >= run.offsets[-1]:
            run.kv_offsets = run.offsets
            run.lens = [end - start for start, end in zip(run.offsets, run.offsets[1:])]


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
