"""The plan, tiles of 128 keys of each request, is made at the first call with a seq_lens buffer; keys that come after them later are left out."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.plans = Memory()

    def start(self, run):
        super().start(run)
        lengths = run.p.seq_lens
        run.tiles = self.plans.of(lengths, lambda: [-(-n // 128) for n in lengths.tolist()])

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = max(0, min(len(keys), run.tiles[r] * 128 - first_key))
        return super().attend(run, r, query, keys[:n], values[:n], seen[:, :n], sinks, position, first_key)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
