"""Wrong: rows that see over 128 keys, more than one tile, come out half a percent too large."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        several = (seen.sum(1) > 128)[:, None, None]
        return torch.where(several, out * 1.005, out), lse


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
