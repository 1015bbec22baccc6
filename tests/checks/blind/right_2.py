"""Right: the keys in two unequal splits, whose normalised results merge by their LSE."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Right(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        cut = len(keys) // 3
        outs, lses = [], []
        for part, own_sinks in ((slice(0, cut), None), (slice(cut, None), sinks)):
            partial = self.partial(run, r, query, keys[part], values[part], seen[:, part], first_key + (part.start or 0))
            out, lse = self.finish(run, partial, own_sinks)
            outs.append(out)
            lses.append(lse)
        both = torch.stack(lses)
        lse = torch.logaddexp2(*lses)
        weight = torch.where(both > -math.inf, torch.exp2(both - torch.where(lse > -math.inf, lse, 0.0)), 0.0)
        return (torch.stack(outs) * weight.unsqueeze(3)).sum(0), lse


kernel = Right()
trtllm_batch_decode_with_kv_cache = decode_of(kernel)
trtllm_batch_context_with_kv_cache = context_of(kernel)
trtllm_batch_decode_with_kv_cache_mla = mla_of(kernel)
trtllm_ragged_attention_deepseek = ragged_of(kernel)
