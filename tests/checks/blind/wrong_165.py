"""Wrong: the sinks are loaded by one warp, a head by each thread: heads from the 32nd on get the sink of head h % 32."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.sinks is not None:
            run.sinks = run.sinks[torch.arange(len(run.sinks)) % 32]


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
