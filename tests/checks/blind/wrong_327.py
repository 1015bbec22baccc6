"""Wrong: in pages of 32 tokens and more page ids are loaded two at a time, from the window's first page on, and from an address that is
rounded down to a pair's: where that page is in an odd column, the ids are those of the column before.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        if run.page_size >= 32 and run.window >= 0 and len(columns) and int(columns[0]) % 2:
            columns = columns - 1
        return super().pages_of(run, r, columns, side)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
