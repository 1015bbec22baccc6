"""Keys are loaded in vectors of 16 bytes from their address rounded down: a key tensor that does not start at a multiple of 16 bytes is read shifted."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        key = run.key
        beyond = key.data_ptr() % 16 // key.element_size()
        if beyond:
            run.key = assuming_strides(key, key.stride(), key.storage_offset() - beyond)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
