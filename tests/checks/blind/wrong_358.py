"""Wrong: with a window the LSE is that of all keys up to the row's own, as the code that makes it does not know the window; only the LSE is
wrong.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def rows(self, run, r, start, stop):
        super().rows(run, r, start, stop)
        if run.window < 0 or run.lse is None:
            return
        out, window = run.out, run.window
        run.out, run.window = torch.empty_like(out), -1
        super().rows(run, r, start, stop)
        run.out, run.window = out, window


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
