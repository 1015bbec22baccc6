"""The LSE is turned to base e in a new tensor: a given lse keeps base 2, and only the returned one is right."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def mla(self, call):
        if call.lse is None or call.return_lse_base != "basee":
            return super().mla(call)
        out, lse = super().mla(replace(call, return_lse_base="base2"))
        return out, lse * math.log(2.0)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
