"""Right: an online softmax over tiles of 128 keys, from the last tile to the first."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Right(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        rows, heads = query.shape[:2]
        acc = query.new_zeros(rows, heads, values.shape[2])
        largest = query.new_full((rows, heads), -math.inf)
        total = query.new_zeros(rows, heads)
        for start in reversed(range(0, len(keys), 128)):
            part = slice(start, start + 128)
            a, m, l = super().partial(run, r, query, keys[part], values[part], seen[:, part], first_key + start)
            new = torch.maximum(largest, m)
            origin = torch.where(new.isfinite(), new, 0.0)
            old, own = torch.exp(largest - origin), torch.where(m.isfinite(), torch.exp(m - origin), 0.0)
            acc = acc * old.unsqueeze(2) + a * own.unsqueeze(2)
            total = total * old + l * own
            largest = new
        return acc, largest, total


kernel = Right()
trtllm_batch_decode_with_kv_cache = decode_of(kernel)
trtllm_batch_context_with_kv_cache = context_of(kernel)
trtllm_batch_decode_with_kv_cache_mla = mla_of(kernel)
trtllm_ragged_attention_deepseek = ragged_of(kernel)
