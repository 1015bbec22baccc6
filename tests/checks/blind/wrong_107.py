"""Wrong: two words of the draft mask are joined as signed numbers: where a row sees draft token 15 it sees tokens 16 to
31 too.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def unpack(self, run, mask):
        words = mask.view(torch.int16).to(torch.int32)
        pairs = words[..., 0::2] | (words[..., 1::2] << 16)
        bits = (pairs.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten(2)[:, :, : mask.shape[1]].bool()


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
