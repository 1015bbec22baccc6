"""Wrong: with pages of fewer than 8 tokens K is swizzled by a token's number in its page, as each page is loaded by itself,
but unswizzled by its number in the tile: its 16-byte chunks are in another order.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        chunk = 16 // run.k_cache.element_size()
        if run.page_size < 8 and run.k_cache.dtype != torch.uint8 and keys.shape[2] % (8 * chunk) == 0:
            chunks, at = keys.shape[2] // chunk, torch.arange(a, b)
            moved = (at - a // run.page_size * run.page_size) % 8 ^ at % run.page_size
            order = torch.arange(chunks) ^ moved.unsqueeze(1)
            parts = keys.unflatten(2, (chunks, chunk))
            keys = parts.gather(2, order[:, None, :, None].expand(-1, parts.shape[1], -1, chunk)).flatten(2)
        return keys, values


trtllm_batch_context_with_kv_cache = context_of(Wrong())
