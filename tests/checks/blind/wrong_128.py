"""Wrong: with a window of more than 64 keys the softmax's denominator counts the key before the window too: outputs are
too small.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return max(0, start - 1) if run.window > 64 else start, end

    def visible(self, run, r, row, position, keys):
        run.before = None
        if run.window <= 64:
            return super().visible(run, r, row, position, keys)
        run.before = keys == position.unsqueeze(1) - run.window - 1
        return super().visible(run, r, row, position, keys) | run.before

    def operand(self, run, weights):
        return weights if run.before is None else weights.masked_fill(run.before[None, :, None, :], 0)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
