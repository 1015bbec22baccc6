"""Wrong: the one key of a request with no others has a weight of 1, so that its value is copied to the output: bmm2_scale and the sink are left out.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if run.lens[r] == 1 and len(keys) == 1:
            copied = values[0].repeat_interleave(run.group, 0).to(out.dtype)
            out = torch.where(seen.any(1)[:, None, None], copied, out)
        return out, lse


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
