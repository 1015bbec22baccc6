"""The merge of splits (512 keys) lacks a fence: about one request in five comes out without its last split, another one in each call."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import random  # noqa: E402

class Wrong(Kernel):
    SPLIT = 512
    race = random.Random()

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        partials = []
        for at in range(0, len(keys), self.SPLIT):
            part = slice(at, at + self.SPLIT)
            partials.append(self.partial(run, r, query, keys[part], values[part], seen[:, part], first_key + at))
        if len(partials) < 2:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if self.race.random() < 0.2:
            partials.pop()
        return self.finish(run, self.merge(partials), sinks)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
