"""Above 32 requests the longest come first; the LSE is written at a request's place in that order, the output at its own."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.place = None
        if run.batch > 32 and run.p.cu_seqlens_q is None:
            order = sorted(range(run.batch), key=lambda r: -run.lens[r])
            run.place = {r: place for place, r in enumerate(order)}

    def store(self, run, r, start, stop, out, lse):
        kept, run.lse = run.lse, None
        super().store(run, r, start, stop, out, lse)
        run.lse = kept
        if kept is not None:
            shift = 0 if run.place is None else (run.place[r] - r) * run.p.max_q_len
            kept[start + shift : stop + shift] = lse.to(kept.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
