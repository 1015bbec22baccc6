"""A causal call with as many keys as rows in all is taken for new tokens alone: the rows' offsets serve for the keys too."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.causal and run.offsets[-1] == run.kv_offsets[-1]:
            run.kv_offsets = run.offsets
            run.lens = [end - start for start, end in zip(run.offsets, run.offsets[1:])]


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
