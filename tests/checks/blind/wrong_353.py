"""Wrong: sinks are loaded four at a time from their address rounded down to 16 bytes: those of a slice that begins elsewhere are shifted.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        sinks = run.p.sinks
        if sinks is not None:
            shift = sinks.data_ptr() % 16 // 4
            run.sinks = assuming_strides(sinks, (1,), sinks.storage_offset() - shift).to(run.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
