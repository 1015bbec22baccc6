"""Wrong: two CTAs take the pages of a request in turn, and the end of the request is masked by the first one alone: a last
page in an odd column that is not full is seen whole.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def rows(self, run, r, start, stop):
        pages = -(-run.lens[r] // run.page_size)
        run.all_seen = run.lens[r] if pages and pages % 2 == 0 and run.lens[r] % run.page_size else None
        super().rows(run, r, start, stop)

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if run.all_seen is not None:
            end = -(-run.lens[r] // run.page_size) * run.page_size
        return start, end

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return seen if run.all_seen is None else seen | (keys >= run.all_seen)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
