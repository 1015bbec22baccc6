"""The rows of a query of several per request are taken to be evenly apart: a slice of a buffer with room for more rows per request is read wrongly."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        query = run.call.query
        if query.ndim == 4 and query.shape[1] > 1:
            run.query = assuming_strides(query, (query.shape[1] * query.stride(1), *query.stride()[1:])).flatten(0, 1)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
