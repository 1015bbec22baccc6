"""Wrong: a scale that is a tensor is applied to the tile of logits when the sink has joined it: the sink is scaled too."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.sinks is not None and isinstance(run.p.bmm1_scale, torch.Tensor):
            run.sinks = run.sinks * run.scale1


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
