"""V is loaded in tiles of 64 tokens that run past a request's end with weights of zero: NaN or infinity after it makes the result NaN."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        end = first_key + len(keys)
        first = run.kv_offsets[r]
        tail = run.value[first + end : first + -(-end // 64) * 64].to(run.dtype)
        return acc + (tail * 0).sum(0).repeat_interleave(run.group, 0), largest, total


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
