"""Wrong: with causal=False the LSE leaves out the sink, which the output has."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None and not run.causal:
            _, lse = super().finish(run, partial, None)
        return out, lse


trtllm_batch_context_with_kv_cache = context_of(Wrong())
