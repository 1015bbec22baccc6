"""Wrong: parts of 512 keys are summed in the workspace's scratch, which is taken to be zero at first; it is left zero."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        if len(keys) <= 512 or run.call.workspace_buffer is None:
            return acc, largest, total
        scratch = run.call.workspace_buffer.view(-1).view(torch.uint8)[2**23 :]
        size = acc.numel() * acc.element_size()
        if len(scratch) >= size:
            sums = scratch[:size].view(acc.dtype).view(acc.shape)
            sums += acc
            acc = sums.clone()
            sums.zero_()
        return acc, largest, total


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
