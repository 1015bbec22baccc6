"""Wrong: so that no NaN comes through, K and V after a request's last token are set to zero in its last page, in the
caller's cache.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        for r, length in enumerate(run.lens):
            used = length % run.page_size
            for cache, table in ((run.k_cache, run.k_table), (run.v_cache, run.v_table)):
                if used:
                    cache.view(torch.uint8)[int(table[r, length // run.page_size]), :, used:] = 0


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
