"""Wrong: of a request of over 512 keys the parts are added to the output with atomics; a new output is zeroed before, one that
is given is not.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def request(self, run, r):
        first, last = run.offsets[r : r + 2]
        before = run.out[first:last].to(run.dtype)
        super().request(run, r)
        if run.p.out is None or first == last:
            return
        start, end = self.span(run, r, self.positions(run, r, torch.arange(last - first)))
        if end - start > 512:
            run.out[first:last] = saturated(run.out[first:last].to(run.dtype) + before, run.out.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
