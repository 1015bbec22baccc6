"""NVFP4, interleaved factors of V: more than 8 of a token (head_dim 256) are looked for in blocks of 8, one block after the other in a page."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


BLOCK = 8  # factors that a thread reads at once: all of head_dim 128


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        p = run.p
        factors = p.v_scale_factors
        if factors is None or not p.v_scale_factors_interleaved:
            return
        pages, heads, tokens, count = factors.shape
        if count <= BLOCK or count % BLOCK:
            return
        blocks = factors.contiguous().view(torch.uint8).reshape(pages, heads, count // BLOCK, tokens // 4, BLOCK, 4)
        plain = blocks.permute(0, 1, 3, 5, 2, 4).reshape(pages, heads, tokens, count)
        run.v_factors = plain.contiguous().view(E4M3)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
