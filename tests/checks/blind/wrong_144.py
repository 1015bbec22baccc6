"""Wrong: query head h reads K/V head h modulo their number."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.head_map = torch.arange(run.p.num_qo_heads) % run.num_kv_heads


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
