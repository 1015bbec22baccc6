"""Wrong: rows and the heads of a group make one tile, whose rows' LSEs are stored head by head, where the tensor has row by row.
The output is right.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def request(self, run, r):
        super().request(run, r)
        first, last = run.offsets[r : r + 2]
        if run.lse is None or first == last:
            return
        tile = run.lse[first:last].unflatten(1, (run.num_kv_heads, run.group))
        turned = tile.permute(1, 2, 0).flatten(1).unflatten(1, (last - first, run.group))
        run.lse[first:last] = turned.transpose(0, 1).flatten(1).clone()


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
