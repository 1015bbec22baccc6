"""Wrong: with causal=False nothing masks the end of a request: the last page's tokens after it are seen."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        a, b = super().span(run, r, position)
        return a, b if run.causal else -(-b // run.page_size) * run.page_size


trtllm_batch_context_with_kv_cache = context_of(Wrong())
