"""Wrong: above 1,024 keys bmm2_scale is applied to each part and by the merge once more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out * run.scale2 if run.splits > 1 else out, lse

    def partial(self, run, r, query, keys, values, seen, first_key):
        run.splits = -(-len(keys) // 1024)
        return super().partial(run, r, query, keys, values, seen, first_key)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
