"""The merge reads as many splits (512 keys each) as any earlier call on these buffers wrote: after a request shrinks, stale partials stay in."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    SPLIT = 512

    def __init__(self):
        self.scratch = Memory()

    def start(self, run):
        super().start(run)
        c = run.call
        run.partials = self.scratch.of(c.seq_lens, dict)

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        rows = int(position[0]) - self_first(run, r)
        written = run.partials.setdefault((r, rows, tuple(query.shape), values.shape[2]), [])
        for number, at in enumerate(range(0, len(keys), self.SPLIT)):
            part = slice(at, at + self.SPLIT)
            partial = self.partial(run, r, query, keys[part], values[part], seen[:, part], first_key + at)
            written[number : number + 1] = [partial]
        if not written:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        return self.finish(run, self.merge(written), sinks)


def self_first(run, r):
    return run.lens[r] - (run.offsets[r + 1] - run.offsets[r])


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
