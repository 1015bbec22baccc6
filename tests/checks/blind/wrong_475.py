"""The causal limit of a packed row (query row and head of a group) divides by the group rounded up to a power of two."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        run.position = position
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)

    def mask_scores(self, run, r, s, first_key):
        if run.shown is not None:
            return s
        _, rows, group, n = s.shape
        shift = (group - 1).bit_length()
        before = run.lens[r] - (run.offsets[r + 1] - run.offsets[r])
        packed = (run.position - before).unsqueeze(1) * group + torch.arange(group)
        limit = before + (packed >> shift)
        return s.masked_fill((first_key + torch.arange(n)) > limit.unsqueeze(2), -math.inf)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
