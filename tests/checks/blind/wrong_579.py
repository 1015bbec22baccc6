"""Wrong: an LSE in base e is converted into a new tensor: a given lse stays in base 2."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def mla(self, call):
        problem = call.problem()
        out, lse = problem.results()
        run = SimpleNamespace(call=call, p=problem, out=out, lse=lse)
        if problem.num_rows:
            self.solve(run)
        if lse is not None and call.return_lse_base == "basee":
            lse = lse * math.log(2.0)
        return call.returned(out, lse)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
