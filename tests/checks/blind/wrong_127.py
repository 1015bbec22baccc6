"""Wrong: of pages of 128 tokens or more every tile of 64 keys reads the first 64."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        if run.page_size < 128:
            return super().entries(run, side, pages, cut)
        tokens = super().entries(run, side, pages, slice(None)).unflatten(0, (len(pages), run.page_size))
        return tokens[:, torch.arange(run.page_size) % 64].flatten(0, 1)[cut]


trtllm_batch_context_with_kv_cache = context_of(Wrong())
