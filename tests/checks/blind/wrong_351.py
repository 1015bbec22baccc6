"""Wrong: a tile of 128 keys has room for 16 page ids, as many as pages of 8 tokens need; with smaller pages those after the 16th of a tile
wrap around.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        in_tile = columns % (128 // run.page_size) if run.page_size < 8 else columns % 16
        return super().pages_of(run, r, columns - in_tile + in_tile % 16, side)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
