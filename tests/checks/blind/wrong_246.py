"""Wrong: tiles of 64 keys of all requests lie end to end and are dealt in equal parts; a request's result is merged of its
first and its last part, as if it never had more.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.tiles = [0]
        for n in run.lens:
            run.tiles.append(run.tiles[-1] - -n // 64)
        run.part = max(4, -(-run.tiles[-1] // 132))

    def visible(self, run, r, row, position, keys):
        part = (run.tiles[r] + keys // 64) // run.part
        first, last = run.tiles[r] // run.part, (run.tiles[r + 1] - 1) // run.part
        return super().visible(run, r, row, position, keys) & ((part == first) | (part == last))


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
