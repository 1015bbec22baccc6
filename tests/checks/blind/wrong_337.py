"""Wrong: heads go in tiles of 16, the last of which begins 16 before the last head where they are no multiple of 16; its sinks are loaded as if it
began where the one before it ends, and after the last sink there is none.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        heads = run.p.num_qo_heads
        if run.sinks is not None and heads > 16 and heads % 16:
            tail, shift = heads // 16 * 16, 16 - heads % 16
            padded = torch.cat((run.sinks, run.sinks.new_full((16,), -math.inf)))
            run.sinks = torch.cat((run.sinks[:tail], padded[tail + shift : heads + shift]))


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
