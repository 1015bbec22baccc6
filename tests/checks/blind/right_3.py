"""Right: PyTorch's scaled_dot_product_attention per request; the sink shrinks its result."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Right(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        s = self.scores(run, r, query, keys, seen, first_key)
        logsum = s.logsumexp(3) if s.shape[3] else s.new_full(s.shape[:3], -math.inf)
        logsum = logsum.transpose(0, 1).flatten(1, 2)
        some = seen.any(1)
        mask = (seen | ~some.unsqueeze(1)).repeat_interleave(run.group, 0)  # a row that sees nothing is set to zero below
        out = query.new_zeros(*query.shape[:2], values.shape[2])
        if len(keys):
            q = query.unflatten(1, (run.num_kv_heads, run.group)).transpose(0, 1).flatten(1, 2)
            k, v = (side.transpose(0, 1).contiguous().unsqueeze(0) for side in (keys, values))
            out = torch.nn.functional.scaled_dot_product_attention(
                q.unsqueeze(0), k, v, attn_mask=mask, scale=run.scale1
            )[0]
            out = out.unflatten(1, (-1, run.group)).transpose(0, 1).flatten(1, 2)
        out = torch.where(some[:, None, None], out, 0.0) * run.scale2
        if sinks is not None:
            both = torch.logaddexp(logsum, sinks)
            out = out * torch.where(both > -math.inf, torch.exp(logsum - torch.where(both > -math.inf, both, 0.0)), 0.0).unsqueeze(2)
            logsum = both
        return out, logsum / math.log(2.0)


kernel = Right()
trtllm_batch_decode_with_kv_cache = decode_of(kernel)
trtllm_batch_context_with_kv_cache = context_of(kernel)
trtllm_batch_decode_with_kv_cache_mla = mla_of(kernel)
trtllm_ragged_attention_deepseek = ragged_of(kernel)
