"""Wrong: where a block of 128 keys raises the largest logit by more than 8 (base 2), the accumulator is rescaled and the sum of weights is not."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


BLOCK = 128
JUMP = 8 * math.log(2.0)


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        state = None
        for at in range(0, max(len(keys), 1), BLOCK):
            cut = slice(at, at + BLOCK)
            more = super().partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + at)
            if state is None:
                state = more
                continue
            acc, largest, total = self.merge([state, more])
            jumped = state[1].isfinite() & (more[1] - state[1] > JUMP)
            state = acc, largest, torch.where(jumped, state[2] + more[2], total)
        return state


trtllm_batch_context_with_kv_cache = context_of(Wrong())
