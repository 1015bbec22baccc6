"""Wrong: the value is taken to be packed, although it may be a part of a wider projection."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.value = assuming_strides(run.value, packed_strides(run.value.shape))


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
