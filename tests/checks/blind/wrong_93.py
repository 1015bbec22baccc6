"""A given lse is written only where return_lse is True."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def _call(self, call):
        problem = call.problem()
        out, lse = problem.results()
        run = SimpleNamespace(call=call, p=problem, out=out, lse=lse if call.return_lse else None)
        if problem.num_rows:
            self.solve(run)
        return problem.returned(out, lse)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
