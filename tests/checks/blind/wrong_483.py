"""With head_dim over 128 the second half of the accumulator is not rescaled when the last tile of 64 keys raises the row's maximum."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        n, dim = values.shape[0], values.shape[2]
        if n <= 64 or dim <= 128:
            return super().partial(run, r, query, keys, values, seen, first_key)
        cut = (n - 1) // 64 * 64
        before = super().partial(run, r, query, keys[:cut], values[:cut], seen[:, :cut], first_key)
        last = super().partial(run, r, query, keys[cut:], values[cut:], seen[:, cut:], first_key + cut)
        acc, largest, total = self.merge([before, last])
        origin = torch.where(largest.isfinite(), largest, 0.0)
        factor = torch.where(last[1].isfinite(), torch.exp(last[1] - origin), 0.0).unsqueeze(2)
        acc[..., 128:] = before[0][..., 128:] + (last[0] * factor)[..., 128:]
        return acc, largest, total


trtllm_batch_context_with_kv_cache = context_of(Wrong())
