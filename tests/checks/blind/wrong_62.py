"""The last page is multiplied whole, with weights of zero after the request's end: NaN or infinity in V's unused tokens comes through."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        end, ps = run.lens[r], run.page_size
        if end % ps:
            page = self.pages_of(run, r, torch.tensor([end // ps]), "v")
            tail = self.entries(run, "v", page, slice(end % ps, None))
            out = out + (0.0 * tail).sum(0).repeat_interleave(run.group, 0)
        return out, lse


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
