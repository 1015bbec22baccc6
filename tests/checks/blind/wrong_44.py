"""Causal rows before a request's first key (more rows than keys) have their position clamped to 0, so that they see key 0."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def positions(self, run, r, row):
        return super().positions(run, r, row).clamp(min=0)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
