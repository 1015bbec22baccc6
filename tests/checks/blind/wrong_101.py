"""Wrong: a request of more than 256 keys is cut into parts of equal size, rounded down; the keys left over are lost."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        part = super().partial
        splits = -(-len(keys) // 256)
        if splits < 2:
            return part(run, r, query, keys, values, seen, first_key)
        size = len(keys) // splits
        cuts = [slice(i * size, (i + 1) * size) for i in range(splits)]
        return self.merge([part(run, r, query, keys[c], values[c], seen[:, c], first_key + c.start) for c in cuts])


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
