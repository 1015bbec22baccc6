"""Wrong: parts of 256 keys are merged two by two, level by level; the one that is left over of an odd number goes on to the
next level after the first one alone, and is lost after later ones.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


def merged_parts(count):
    """Return which parts come through the tree."""
    level, first = [[i] for i in range(count)], True
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + (level[-1:] if len(level) % 2 and first else [])
        first = False
    return level[0] if level else []


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        part = (keys - keys[:1]) // 256
        through = torch.tensor(merged_parts(-(-len(keys) // 256)), dtype=torch.int64)
        return seen & torch.isin(part, through)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
