"""Wrong: the draft tokens of a mask begin at key max(0, length - q_len): of a request with fewer keys than rows at the wrong bit."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        missing = 0 if run.shown is None else run.shown.shape[1] - run.lens[r]
        if missing <= 0:
            return seen
        seen = run.shown[r][row][:, keys]
        return seen & (keys >= position.unsqueeze(1) - run.window) if run.window >= 0 else seen


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
