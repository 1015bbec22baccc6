"""Wrong: the sink's weight is taken against the largest logit of the first tile of 256 keys, and is not rescaled when that grows."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        acc, largest, total = partial
        if sinks is None or run.first_largest is None:
            return super().finish(run, partial, sinks)
        first = torch.where(run.first_largest.isfinite(), run.first_largest, largest)
        return super().finish(run, partial, sinks + torch.where(largest.isfinite(), largest - first, 0.0))

    def mask_scores(self, run, r, s, first_key):
        n = 256 - first_key % 256
        first = s[..., :n].amax(3) if s.shape[3] else None
        run.first_largest = None if first is None else first.transpose(0, 1).flatten(1, 2)
        return s


trtllm_batch_context_with_kv_cache = context_of(Wrong())
