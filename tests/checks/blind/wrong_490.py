"""Heads from 64 on run in a second CTA, which reads the sinks from its own head 0 on."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.sinks is not None:
            run.sinks = run.sinks[torch.arange(len(run.sinks)) % 64]


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
