"""Wrong: the requests of a query of four dimensions are taken to lie q_len_per_request rows apart: in a part of a buffer with
room for more rows of each request those of the wrong places are read.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        query = run.call.query
        if query.dim() == 4:
            strides = list(query.stride())
            strides[0] = query.shape[1] * strides[1]
            run.query = assuming_strides(query, strides).flatten(0, 1)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
