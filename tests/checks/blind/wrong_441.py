"""With a draft mask the window is counted from a token's depth in the tree (the bits of its row), not from its row."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.deep = run.shown is not None and run.window >= 0

    def edges(self, run, r, row, position):
        depth = run.shown[r][row].sum(1).clamp(min=1) - 1
        return run.lens[r] - run.shown.shape[1] + depth - run.window

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if run.deep:
            row = position - (run.lens[r] - run.shown.shape[1])
            start = min(max(0, int(self.edges(run, r, row, position).min())), end)
        return start, end

    def visible(self, run, r, row, position, keys):
        if not run.deep:
            return super().visible(run, r, row, position, keys)
        window, run.window = run.window, -1
        seen = super().visible(run, r, row, position, keys)
        run.window = window
        return seen & (keys >= self.edges(run, r, row, position).unsqueeze(1))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
