"""Wrong: the position of a row is computed in the dtype of seq_lens; of uint32 lengths one before the first key wraps
around and sees all keys.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def positions(self, run, r, row):
        position = super().positions(run, r, row)
        return position % 2**32 if run.p.seq_lens.dtype == torch.uint32 else position


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
