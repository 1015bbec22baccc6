"""A chunk of a prefix of more than 1024 keys is split between two CTAs; the LSE of the two is the larger one, not that of their sum."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


LONG = 1024


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = len(keys)
        if run.causal or n <= LONG:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        middle = -(-n // 128) // 2 * 128
        cuts = slice(0, middle), slice(middle, n)
        partials = [self.partial(run, r, query, keys[c], values[c], seen[:, c], first_key + c.start) for c in cuts]
        out, _ = self.finish(run, self.merge(partials), sinks)
        lse = [self.finish(run, partial, s)[1] for partial, s in zip(partials, (sinks, None))]
        return out, torch.maximum(*lse)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
