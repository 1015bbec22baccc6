"""Wrong: the last request's keys end where key ends, not at the last offset: those of nobody after it are seen, and its rows'
positions are counted from that end.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.batch:
            run.lens[-1] = len(run.key) - run.kv_offsets[-2]


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
