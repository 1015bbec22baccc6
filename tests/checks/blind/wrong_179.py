"""Wrong: the exponentials of every fourth key are computed on the FMA units, a power of 2 added to the exponent field
of a polynomial; that is not clamped, and below 2**-127 it wraps around into the sign.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def denominator(self, run, s, weights, largest):
        """Return the sum of the weights, whose every fourth is computed anew, in place."""
        if weights.dtype == torch.float32:
            logits = s[..., ::4]
            x = (logits - torch.where(largest.isfinite(), largest, 0.0).unsqueeze(3)) / math.log(2.0)
            whole = torch.where(x.isfinite(), x.floor(), 0.0)
            bits = torch.exp2(x - whole).clamp(1.0, 2.0 - 2.0**-23).view(torch.int32).long() + (whole.long() << 23)
            bits = (bits + 2**31) % 2**32 - 2**31
            weights[..., ::4] = torch.where(logits.isfinite(), bits.int().view(torch.float32), 0.0)
        return weights.sum(3)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
