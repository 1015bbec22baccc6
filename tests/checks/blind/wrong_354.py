"""Wrong: the tokens in a page are counted by page id, and the last request of the batch that has a page says it: of a page that it ends in,
other requests see no more.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.filled = torch.zeros(len(run.k_cache), dtype=torch.long)
        for r, length in enumerate(run.lens):
            columns = torch.arange(-(-length // run.page_size))
            run.filled[run.k_table[r, columns].long()] = (length - columns * run.page_size).clamp(max=run.page_size)

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        pages = run.k_table[r, keys // run.page_size].long()
        return seen & (keys % run.page_size < run.filled[pages])


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
