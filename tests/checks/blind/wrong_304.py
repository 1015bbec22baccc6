"""Wrong: the normalised results of parts of 384 keys are merged by their largest logits, not by their LSEs; the LSE is that of the
largest logits too.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        if len(keys) <= 384:
            return super().partial(run, r, query, keys, values, seen, first_key)
        parts = []
        for at in range(0, len(keys), 384):
            cut = slice(at, at + 384)
            acc, largest, total = super().partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + at)
            one = torch.where(total > 0, total, 1.0)
            parts.append((acc / one.unsqueeze(2), largest, (total > 0).to(total.dtype)))
        return self.merge(parts)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
