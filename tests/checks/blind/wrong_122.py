"""Wrong: requests with one new token go down a decode path that reads the query row of the request's number."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        if run.offsets[r + 1] - run.offsets[r] == 1:
            at = min(r, run.p.num_rows - 1)
            query = index(run.query, slice(at, at + 1)).to(run.dtype)
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
