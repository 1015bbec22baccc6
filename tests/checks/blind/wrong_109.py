"""Wrong: for an e4m3 query the weights are rounded to e4m3 as they are, at most 1, so that those below 2**-10 are lost
from the sum over V.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def operand(self, run, weights):
        return weights.to(E4M3).to(weights.dtype) if run.query.dtype == E4M3 else weights


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
