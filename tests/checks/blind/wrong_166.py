"""Wrong: the XQA path takes causality from the draft mask alone: without one every row sees all keys of its request."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.call.backend == "xqa" and run.p.cu_seqlens_q is None:
            run.causal = False


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
