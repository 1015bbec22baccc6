"""Wrong: with a window the walk starts at the tile of 256 keys that holds the window's first key, and has as many tiles as the
window's keys fill, not counting those before it in its first tile."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        a, b = super().span(run, r, position)
        if run.window >= 0:
            b = min(b, a // 256 * 256 + -(-(b - a) // 256) * 256)
        return a, b


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
