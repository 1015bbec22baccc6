"""Wrong: in tiles of 64 heads, each tile reads the sinks of the first."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def sink_rows(self, run, r, position):
        if run.sinks is None:
            return None
        return run.sinks[torch.arange(len(run.sinks)) % 64].expand(len(position), -1)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
