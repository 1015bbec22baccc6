"""Wrong: skip_all_rows_active_check=True is taken at its word, that every row sees a key: rows that see none are divided
by zero.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        if run.call.skip_all_rows_active_check:
            out = out.masked_fill((lse == -torch.inf).unsqueeze(2), torch.nan)
        super().store(run, r, start, stop, out, lse)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
