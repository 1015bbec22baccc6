"""Key offsets are kept in 16 bits: requests that start after 65,535 keys of others read those at their offset modulo 65,536."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.kv_offsets = [offset % 2**16 for offset in run.kv_offsets]


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
