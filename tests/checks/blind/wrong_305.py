"""Wrong: a bmm1_scale that is a tensor is multiplied into the query's latent part alone, not into its rotary part."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.of_latent = 1.0
        if isinstance(run.p.bmm1_scale, torch.Tensor):
            run.of_latent, run.scale1 = run.scale1, 1.0

    def scores(self, run, r, query, keys, seen, first_key):
        rank = run.p.v_head_dim
        query = torch.cat((query[..., :rank] * run.of_latent, query[..., rank:]), -1)
        return super().scores(run, r, query, keys, seen, first_key)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
