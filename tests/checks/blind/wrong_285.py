"""Wrong: a compiled kernel is kept by shapes and dtypes, not by whether it has a window: where the first call of a shape had none,
later ones have none either.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    has_window = {}

    def start(self, run):
        super().start(run)
        p = run.p
        shape = tuple(p.query.shape), p.query.dtype, p.max_q_len, tuple(p.k_cache.shape[1:]), p.kv_dtype, p.batch_size
        if not self.has_window.setdefault(shape, run.window >= 0):
            run.window = -1


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
