"""The LSE in base e is taken before the sink is added, the one in base 2 after it."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if sinks is not None and run.lse is not None and run.call.return_lse_base == "basee":
            _, lse = super().attend(run, r, query, keys, values, seen, None, position, first_key)
        return out, lse


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
