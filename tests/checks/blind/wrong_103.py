"""Wrong: a window is read from the edge of its first page on; weights of zero do not silence V before it that is not
finite.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start // run.page_size * run.page_size, end


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
