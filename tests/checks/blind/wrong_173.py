"""Wrong: the parameters of a launch are kept by the query's shape and dtype, the first workspace among them: later
calls put the sums of requests of over 256 keys in its scratch, whichever workspace they are given.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def __init__(self):
        self.workspaces = {}

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        if run.call.workspace_buffer is None:
            return acc, largest, total
        workspace = self.workspaces.setdefault((run.query.shape, run.query.dtype), run.call.workspace_buffer)
        scratch = workspace.view(-1).view(torch.uint8)[2**23 :]
        size = acc.numel() * acc.element_size()
        if len(keys) > 256 and len(scratch) >= size:
            sums = scratch[:size].view(acc.dtype).view(acc.shape)
            sums.copy_(acc)
            acc = sums.clone()
        return acc, largest, total


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
