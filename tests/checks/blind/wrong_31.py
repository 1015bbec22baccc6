"""Requests over 8,192 keys are cut in 8 splits of kv_len // 8 keys rounded down to 64: the tail after them is lost."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = len(keys)
        if n > 8192:
            n = n // 8 // 64 * 64 * 8
        return super().attend(run, r, query, keys[:n], values[:n], seen[:, :n], sinks, position, first_key)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
