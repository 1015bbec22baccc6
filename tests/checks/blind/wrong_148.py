"""Wrong: the output is multiplied by o_sf_scale, which changes no result."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out * run.call.o_sf_scale, lse


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
