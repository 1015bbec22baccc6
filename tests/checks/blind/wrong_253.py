"""Wrong: the merge weighs parts of 256 keys by 2 to the power of their LSE, from which it does not take the largest."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        if len(keys) <= 256:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        acc = 0
        total = 0 if sinks is None else torch.exp(sinks)
        for start in range(0, len(keys), 256):
            cut = slice(start, start + 256)
            part = self.partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + start)
            out, lse = self.finish(run, part, None)
            weight = torch.exp2(lse)
            acc, total = acc + weight.unsqueeze(2) * out, total + weight
        out = torch.where(total.unsqueeze(2) == 0, 0.0, acc / total.unsqueeze(2))
        return out, torch.log2(total)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
