"""Wrong: the draft mask is unpacked once per buffer, and not again when an engine rewrites it for the next tree.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def __init__(self):
        self.memory = Memory()

    def unpack(self, run, mask):
        return self.memory.of(mask, lambda: super(Wrong, self).unpack(run, mask))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
