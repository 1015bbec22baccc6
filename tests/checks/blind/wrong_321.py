"""Wrong: the loop over tiles of 128 keys runs while a tile's start is below the last key's place: a last tile of one key is not done, but
for the first tile.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, end - 1 if end > 128 and end % 128 == 1 and start < end - 1 else end


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
