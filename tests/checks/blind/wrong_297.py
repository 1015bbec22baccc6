"""Wrong: in pages of 64 tokens and more a window begins at a multiple of 32: rows see up to 31 keys before it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def is_coarse(self, run):
        return run.window >= 0 and run.page_size >= 64

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (start // 32 * 32 if self.is_coarse(run) else start), end

    def visible(self, run, r, row, position, keys):
        if not self.is_coarse(run):
            return super().visible(run, r, row, position, keys)
        first = (position - run.window).clamp(min=0) // 32 * 32
        return (keys <= position.unsqueeze(1)) & (keys >= first.unsqueeze(1))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
