"""Weights and outputs are packed to bfloat16 by truncation (cvt.rz), not rounded: everything is about half a percent too small."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    @staticmethod
    def truncated(x):
        return (x.to(torch.float32).view(torch.int32) & -65536).view(torch.float32)

    def operand(self, run, weights):
        return self.truncated(weights) if run.p.query.dtype == torch.bfloat16 and run.dtype == torch.float32 else weights

    def store(self, run, r, start, stop, out, lse):
        if run.out.dtype == torch.bfloat16 and run.dtype == torch.float32:
            out = self.truncated(out)
        super().store(run, r, start, stop, out, lse)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
