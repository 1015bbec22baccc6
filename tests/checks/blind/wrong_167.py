"""Wrong: the LSE of a part of 512 keys is kept for a request, not for each of its rows: the merge weighs the parts of
all rows as the first row's.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        if len(keys) <= 512:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        partials = []
        for at in range(0, len(keys), 512):
            part = slice(at, at + 512)
            acc, largest, total = self.partial(run, r, query, keys[part], values[part], seen[:, part], first_key + at)
            normal = acc / torch.where(total > 0, total, 1.0).unsqueeze(2)
            lse = (largest + torch.log(total))[:1].expand_as(total)
            partials.append((normal, lse, torch.ones_like(total)))
        return self.finish(run, self.merge(partials), sinks)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
