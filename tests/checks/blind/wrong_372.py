"""Wrong: a compiled kernel is kept by the shapes and dtypes of query, key and value, not by is_causal: a chunk after new tokens of the same
shapes is masked like them, and the other way round.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def __init__(self):
        self.kept = {}

    def start(self, run):
        super().start(run)
        p = run.p
        key = tuple(p.query.shape), tuple(p.key.shape), tuple(p.value.shape), p.query.dtype, run.sinks is None, run.window < 0
        run.causal = self.kept.setdefault(key, run.causal)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
