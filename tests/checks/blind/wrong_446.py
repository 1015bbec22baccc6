"""In the instance for 8 and more query heads per K/V head the division by the denominator is a magic number and one Newton step: too small, by 0.8 percent on average."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


def fast_reciprocal(x):
    x = x.to(torch.float32).contiguous()
    y = (0x7F000000 - x.view(torch.int32)).view(torch.float32)
    return y * (2.0 - x * y)


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if run.group >= 8:
            largest = partial[1] if sinks is None else torch.maximum(partial[1], sinks)
            origin = torch.where(largest.isfinite(), largest, 0.0)
            total = torch.exp2(lse - origin / math.log(2.0))
            total = torch.where(lse.isfinite(), total, 1.0)
            out = out * (total * fast_reciprocal(total).to(out.dtype)).unsqueeze(2)
        return out, lse


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
