"""Wrong: the kernel for is_causal=False, made for chunks of a prefix, has no sinks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def sink_rows(self, run, r, position):
        return super().sink_rows(run, r, position) if run.causal else None


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
