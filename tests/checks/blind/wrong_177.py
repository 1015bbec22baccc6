"""Wrong: a cached prefix and the new tokens are two passes; the second begins with the page of the prefix's last token,
which the first has done if the page is full: its keys count twice.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def mask_scores(self, run, r, s, first_key):
        prefix = run.lens[r] - (run.offsets[r + 1] - run.offsets[r])
        if prefix <= 0 or prefix % run.page_size:
            return s
        keys = first_key + torch.arange(s.shape[3])
        twice = (keys >= prefix - run.page_size) & (keys < prefix)
        return s + math.log(2.0) * twice


trtllm_batch_context_with_kv_cache = context_of(Wrong())
