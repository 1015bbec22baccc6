"""Wrong: with cum_seq_lens_q the LSE is a natural logarithm, also where base 2 is asked for."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def mla(self, call):
        result = super().mla(call)
        if call.return_lse and call.cum_seq_lens_q is not None and call.return_lse_base == "base2":
            result[1].mul_(math.log(2.0))
        return result


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
