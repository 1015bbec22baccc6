"""Sinks in a list or tuple are indexed twice: every head gets the first head's sink."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if isinstance(run.call.sinks, (list, tuple)) and run.sinks is not None:
            run.sinks = run.sinks[:1].expand(len(run.sinks))


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
