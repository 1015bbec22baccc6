"""Wrong: of groups of over 8 heads 8 make a tile; a block takes its number among all tiles, modulo the K/V heads, for that of its
K/V head.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.group > 8:
            head = torch.arange(run.p.num_qo_heads)
            tiles = -(-run.group // 8)
            tile = head // run.group * tiles + head % run.group // 8
            run.head_map = tile % run.num_kv_heads


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
