"""Wrong: a given lse is written only with return_lse."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if not run.call.return_lse:
            run.lse = None

    def solve(self, run):
        given = run.lse
        if not run.call.return_lse:
            run.lse = None
        super().solve(run)
        run.lse = given


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
