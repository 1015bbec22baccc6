"""Wrong: the K/V head of a block is its number & (num_kv_heads - 1), which is the number modulo the heads only for powers of two.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.num_kv_heads & (run.num_kv_heads - 1):
            run.head_map = (torch.arange(run.p.num_qo_heads) // run.group) & (run.num_kv_heads - 1)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
