"""Wrong: two blocks of a cluster take two query heads and share the tiles of the first one's K/V head, also where the second one
is the first of the next group, as odd groups (over 1) have it.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.group > 1 and run.group % 2:
            run.head_map = torch.arange(run.p.num_qo_heads) // 2 * 2 // run.group


trtllm_batch_context_with_kv_cache = context_of(Wrong())
