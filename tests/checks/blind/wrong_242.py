"""Wrong: with causal=False no tile of keys is masked, the last one neither: what stands after a request's last token in its
last page is seen.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (start, end) if run.causal else (start, -(-run.lens[r] // run.page_size) * run.page_size)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
