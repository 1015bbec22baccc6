"""Right: two passes, the LSE of all keys in tiles of 96 first, then normalised weights times V tile by tile."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Right(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        rows, heads = query.shape[:2]
        tiles = [slice(start, start + 96) for start in range(0, len(keys), 96)]
        logsum = query.new_full((rows, heads), -math.inf) if sinks is None else sinks.clone()
        for tile in tiles:
            s = self.scores(run, r, query, keys[tile], seen[:, tile], first_key)
            logsum = torch.logaddexp(logsum, s.logsumexp(3).transpose(0, 1).flatten(1, 2))
        known = torch.where(logsum > -math.inf, logsum, 0.0).unflatten(1, (-1, run.group)).transpose(0, 1).unsqueeze(3)
        out = query.new_zeros(rows, heads, values.shape[2])
        for tile in tiles:
            weights = torch.exp(self.scores(run, r, query, keys[tile], seen[:, tile], first_key) - known)
            part = weights.flatten(1, 2) @ values[tile].transpose(0, 1)
            out += part.unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)
        return out * run.scale2, logsum / math.log(2.0)


kernel = Right()
trtllm_batch_decode_with_kv_cache = decode_of(kernel)
trtllm_batch_context_with_kv_cache = context_of(kernel)
trtllm_batch_decode_with_kv_cache_mla = mla_of(kernel)
trtllm_ragged_attention_deepseek = ragged_of(kernel)
