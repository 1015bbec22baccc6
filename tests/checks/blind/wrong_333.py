"""Wrong: where a window has a multiple of 128 keys, the row's own among them, the tile that the window begins in is masked along its diagonal,
and the diagonal is masked too: a row sees one key less.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.window >= 0 and (run.window + 1) % 128 == 0:
            seen = seen & (keys > position.unsqueeze(1) - run.window)
        return seen


trtllm_batch_context_with_kv_cache = context_of(Wrong())
