"""Wrong: the tokens of a request's last page are counted as seq_len % page_size, so that a full last page has none."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        length, ps = run.lens[r], run.page_size
        pages = -(-length // ps)
        return super().visible(run, r, row, position, keys) & (keys < (pages - 1) * ps + length % ps)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
