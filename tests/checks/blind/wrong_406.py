"""Wrong: window_size + sink_size is added in 32 bits: of a window that means none, near 2**31, the sum is negative, and
kv_indptr goes down. The lists are right.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def counted(self, position, window, sink):
        most = (window + sink + 2**31) % 2**32 - 2**31
        return min(position, most) if window else position


generate_draft_decode_kv_indices = window_lists_of(Wrong())
