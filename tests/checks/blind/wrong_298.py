"""Wrong: where a request has more rows than keys its causal mask begins at the upper left corner: row i sees the keys up to i,
not up to keys - rows + i.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def positions(self, run, r, row):
        position = super().positions(run, r, row)
        more_rows = run.offsets[r + 1] - run.offsets[r] > run.lens[r]
        return row if run.causal and more_rows else position


trtllm_batch_context_with_kv_cache = context_of(Wrong())
