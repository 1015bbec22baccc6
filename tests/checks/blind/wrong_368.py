"""Wrong: heads of a query row are taken to lie side by side, although the product that absorbs W_UK leaves them [heads, rows, dim],
transposed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        query = run.call.query
        *outer, _, _ = query.stride()
        read = assuming_strides(query, (*outer, query.shape[-1], 1))
        run.query = read if query.ndim == 3 else read.reshape(-1, *query.shape[2:])


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
