"""Right: weights are rounded to the query's 16 bits (bfloat16 for e4m3) before P.V, sums are of unrounded ones."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Right(Kernel):
    def operand(self, run, weights):
        dtype = run.p.query.dtype
        if dtype in (torch.float32, torch.float64):
            return weights
        return weights.to(torch.bfloat16 if dtype == E4M3 else dtype).to(weights.dtype)


kernel = Right()
trtllm_batch_decode_with_kv_cache = decode_of(kernel)
trtllm_batch_context_with_kv_cache = context_of(kernel)
trtllm_batch_decode_with_kv_cache_mla = mla_of(kernel)
trtllm_ragged_attention_deepseek = ragged_of(kernel)
