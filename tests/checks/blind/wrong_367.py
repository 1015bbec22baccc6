"""Wrong: parts of 256 keys end with the first key of the next part, which so counts twice.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = len(keys)
        if n > 256:
            read = torch.cat((torch.arange(n), torch.arange(256, n, 256)))
            keys, values, seen = keys[read], values[read], seen[:, read]
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
