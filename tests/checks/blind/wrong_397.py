"""Wrong: the correction of the sums to a larger largest logit comes after the P.V of the tile of 256 keys that has it: that
tile's own part is made smaller too. The denominator is right.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        acc = largest = total = None
        for start in range(0, max(len(keys), 1), 256):
            cut = slice(start, start + 256)
            a, m, l = super().partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + start)
            if acc is None:
                acc, largest, total = a, m, l
                continue
            new = torch.maximum(largest, m)
            origin = torch.where(new.isfinite(), new, 0.0)
            old_factor = torch.where(largest.isfinite(), torch.exp(largest - origin), 0.0)
            own_factor = torch.where(m.isfinite(), torch.exp(m - origin), 0.0)
            late = torch.where(largest.isfinite(), old_factor, 1.0)
            acc = acc * old_factor.unsqueeze(2) + a * (own_factor * late).unsqueeze(2)
            total = total * old_factor + l * own_factor
            largest = new
        return acc, largest, total


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
