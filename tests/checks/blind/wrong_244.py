"""Wrong: a tile of 64 rows votes whether its sums are rescaled, by the most that a row's largest logit grows; NaN in a row of
padding that the tile loads with the last request's makes the vote no.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        first, last = run.offsets[r : r + 2]
        tile_start = first + (last - first - 1) // 64 * 64
        beside = run.query[last : tile_start + 64] if last == run.offsets[-1] else run.query[:0]
        run.is_voted_down = row + first >= tile_start if bool(beside.float().isnan().any()) else None
        return super().visible(run, r, row, position, keys)

    def partial(self, run, r, query, keys, values, seen, first_key):
        right = super().partial(run, r, query, keys, values, seen, first_key)
        if run.is_voted_down is None or not len(keys):
            return right
        acc, total, largest = 0, 0, right[1].new_full(right[1].shape, -torch.inf)
        for start in range(0, len(keys), 64):
            cut = slice(start, start + 64)
            a, m, l = super().partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + start)
            largest = torch.maximum(largest, m)
            factor = torch.where(m.isfinite(), torch.exp(m - largest), 0.0)
            acc, total = acc + a * factor.unsqueeze(2), total + l * factor  # what was summed before stays as it is
        late = run.is_voted_down.unsqueeze(1)
        return torch.where(late.unsqueeze(2), acc, right[0]), largest, torch.where(late, total, right[2])


trtllm_batch_context_with_kv_cache = context_of(Wrong())
