"""Wrong: tiles of 128 keys are summed by turns in two sets of registers, which are merged in the end, each with the factor of
the other one's largest logit.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        if first_key + len(keys) <= 128:
            return super().partial(run, r, query, keys, values, seen, first_key)
        odd = (first_key + torch.arange(len(keys))) // 128 % 2 == 1
        a, m, l = super().partial(run, r, query, keys, values, seen & ~odd, first_key)
        b, n, k = super().partial(run, r, query, keys, values, seen & odd, first_key)
        largest = torch.maximum(m, n)
        both = m.isfinite() & n.isfinite()
        of_a = torch.where(both, torch.exp(n - largest), m.isfinite().to(m.dtype))
        of_b = torch.where(both, torch.exp(m - largest), n.isfinite().to(m.dtype))
        return a * of_a.unsqueeze(2) + b * of_b.unsqueeze(2), largest, l * of_a + k * of_b


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
