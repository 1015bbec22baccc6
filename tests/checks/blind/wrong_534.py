"""The list of work items (request, 128 keys) has room for two per SM and one per request; items beyond are dropped."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


SPLIT, SMS = 128, 132


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        room = run.batch + 2 * SMS
        run.items = []
        for length in run.lens:
            run.items.append(min(-(-length // SPLIT), room))
            room -= run.items[-1]

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < run.items[r] * SPLIT)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
