"""cum_seq_lens_q is read to the host once per buffer: a replay with other widths still uses the first ones."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.read = Memory()

    def start(self, run):
        super().start(run)
        run.offsets = self.read.of(run.call.cum_seq_lens_q, run.call.cum_seq_lens_q.tolist)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
