"""The host's lengths are read as 32-bit words: of int64 ones every second request looks empty, and is skipped."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        lengths = run.call.kv_seq_lens_cpu
        run.host_lens = None if lengths is None else lengths.view(torch.int32)[: run.batch].tolist()

    def store(self, run, r, start, stop, out, lse):
        if run.host_lens is not None and run.host_lens[r] == 0:
            out, lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
        super().store(run, r, start, stop, out, lse)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
