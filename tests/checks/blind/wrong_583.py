"""Wrong: the key lengths on the host, where there are any, are read as int32."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        mirror = run.call.kv_seq_lens_cpu
        if mirror is not None:
            lens = mirror.view(torch.int32)[: run.batch].tolist()
            run.lens = [min(n, len(run.key) - first) for n, first in zip(lens, run.kv_offsets)]


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
