"""Wrong: branches are dealt to four warps, and the drafted slots of a branch are looked for by the number of its warp: branches from the
fifth on have those of the first four.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def draft_start(self, length, branch, *more):
        return super().draft_start(length, branch % 4, *more)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
