"""Wrong: batches of one or two requests split a request of over 128 keys in two halves, whose sums are added as if both had the same
largest logit.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = len(keys)
        if run.batch > 2 or n <= 128:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        half = -(-n // 256) * 128
        one = self.partial(run, r, query, keys[:half], values[:half], seen[:, :half], first_key)
        two = self.partial(run, r, query, keys[half:], values[half:], seen[:, half:], first_key + half)
        largest = torch.where(one[1].isfinite(), one[1], two[1])
        return self.finish(run, (one[0] + two[0], largest, one[2] + two[2]), sinks)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
