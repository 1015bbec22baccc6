"""Right: softmax in base 2, with log2(e) folded into the query's scale, and the heads of a group one by one."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Right(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        log2e = 1.0 / math.log(2.0)
        q = (query * (run.scale1 * log2e)).unflatten(1, (run.num_kv_heads, run.group))
        hidden = ~seen.unsqueeze(0)
        outs, lses = [], []
        for g in range(run.group):
            s = (q[:, :, g].transpose(0, 1) @ keys.permute(1, 2, 0)).masked_fill(hidden, -math.inf)  # [kv_heads, rows, keys]
            largest = s.amax(2, keepdim=True) if len(keys) else s.new_full((*s.shape[:2], 1), -math.inf)
            sink = None if sinks is None else sinks.unflatten(1, (-1, run.group))[:, :, g].t().unsqueeze(2) * log2e
            if sink is not None:
                largest = torch.maximum(largest, sink)
            largest = torch.where(largest.isfinite(), largest, 0.0)
            weights = torch.exp2(s - largest)
            total = weights.sum(2, keepdim=True)
            if sink is not None:
                total = total + torch.exp2(sink - largest)
            outs.append((weights / torch.where(total > 0, total, 1.0)) @ values.transpose(0, 1))
            lses.append((largest + torch.log2(total)).squeeze(2))
        out, lse = torch.stack(outs, 1).flatten(0, 1), torch.stack(lses, 1).flatten(0, 1)
        return out.transpose(0, 1) * run.scale2, lse.t()


kernel = Right()
trtllm_batch_decode_with_kv_cache = decode_of(kernel)
trtllm_batch_context_with_kv_cache = context_of(kernel)
trtllm_batch_decode_with_kv_cache_mla = mla_of(kernel)
trtllm_ragged_attention_deepseek = ragged_of(kernel)
