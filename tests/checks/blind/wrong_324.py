"""Wrong: a row that sees no key gets the sink as its LSE, a natural logarithm, not log2(e) times the sink; only the LSE is wrong.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if sinks is not None:
            blind = ~seen.any(1)
            lse = torch.where(blind.unsqueeze(1), sinks.to(lse.dtype), lse)
        return out, lse


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
