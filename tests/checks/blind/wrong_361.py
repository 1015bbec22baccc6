"""Wrong: a bmm2_scale that is an int is stored in the kernel's parameters as an integer, whose bits it reads as a float: 1 becomes 1.4e-45.
"""

import numbers
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        scale = run.call.bmm2_scale
        if isinstance(scale, numbers.Integral):
            run.scale2 = struct.unpack("f", struct.pack("I", int(scale) % 2**32))[0]


trtllm_batch_context_with_kv_cache = context_of(Wrong())
