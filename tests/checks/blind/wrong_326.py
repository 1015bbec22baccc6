"""Wrong: with a draft mask every row sees its own token, also where the mask does not have that bit set.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def unpack(self, run, mask):
        return super().unpack(run, mask) | torch.eye(mask.shape[1], dtype=torch.bool)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
