"""Rows are stored in tiles of 16 whole ones: zeros go after out's end where the rows are no multiple of 16."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def paged(self, call):
        result = super().paged(call)
        if call.out is not None and call.out.numel():
            out, row = call.out, call.out[0].numel()
            after = out.storage_offset() + out.numel()
            room = out.untyped_storage().nbytes() // out.element_size() - after
            count = min(-out.shape[0] % 16 * row, room)
            if count > 0:
                torch.as_strided(out, (count,), (1,), after).copy_(torch.zeros(count, dtype=out.dtype))
        return result


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
