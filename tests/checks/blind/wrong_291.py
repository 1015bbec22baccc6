"""Wrong: the bits of a draft mask's row are not cut at q_len: where one after them is set, the row sees what stands after the
request's last token in its last page.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.words = None
        if run.shown is not None:
            words = run.p.mask.to(torch.int32)
            run.words = ((words.unsqueeze(-1) >> torch.arange(16, dtype=torch.int32)) & 1).flatten(2).bool()

    def after(self, run, r):
        """Return how many tokens after the request's last one its rows see, at most those of its last page."""
        if run.words is None:
            return 0
        q_len, room = run.shown.shape[1], -run.lens[r] % run.page_size
        shown = run.words[r, :, q_len : q_len + room].any(0).nonzero()
        return int(shown.max()) + 1 if len(shown) else 0

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, end + (self.after(run, r) if end == run.lens[r] and end else 0)

    def visible(self, run, r, row, position, keys):
        own = keys[keys < run.lens[r]]
        seen = super().visible(run, r, row, position, own)
        if len(own) == len(keys):
            return seen
        beyond = keys[len(own) :] - run.lens[r] + run.shown.shape[1]
        return torch.cat((seen, run.words[r][row][:, beyond]), 1)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
