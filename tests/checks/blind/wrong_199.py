"""Wrong: logits are kept in float16 until the largest is subtracted: large ones lose the bits that tell them apart."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def mask_scores(self, run, r, s, first_key):
        rounded = s.clamp(-65504.0, 65504.0).to(torch.float16).to(s.dtype)
        return torch.where(s.isfinite(), rounded, s)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
