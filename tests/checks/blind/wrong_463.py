"""Causal: where max_q_len equals max_kv_len all requests are taken to be square, and row i to be at position i."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def positions(self, run, r, row):
        return row if run.causal and run.p.max_q_len == run.p.max_kv_len else super().positions(run, r, row)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
