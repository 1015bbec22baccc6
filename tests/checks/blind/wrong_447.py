"""The LSE is written 4 heads at a time: into a slice of a wider buffer, of heads that 4 does not divide, it writes beside the slice."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


WIDTH = 4


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        heads = run.p.num_qo_heads
        more = -heads % WIDTH
        given = run.call.lse
        if given is not None and more and given.stride(1) == 1 and given.stride(0) > heads:
            room = given.untyped_storage().nbytes() // given.element_size()
            for row in range(start, stop):
                first = given.storage_offset() + row * given.stride(0) + heads
                fits = min(more, room - first)
                if fits > 0:
                    torch.as_strided(given, (fits,), (1,), first).fill_(-math.inf)
        super().store(run, r, start, stop, out, lse)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
