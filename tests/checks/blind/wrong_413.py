"""Requests over 512 keys are split; the kernel that merges takes the sink of the head's number within its group."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def sink_rows(self, run, r, position):
        if run.sinks is None or run.lens[r] <= 512:
            return super().sink_rows(run, r, position)
        return run.sinks[torch.arange(run.p.num_qo_heads) % run.group].expand(len(position), -1)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
