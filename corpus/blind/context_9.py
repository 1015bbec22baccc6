"""Wrong kernels of the context call, written without a look at the checks: numbers 574 to 576."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, Memory, context_of, index

BLOCK_574 = 128


JUMP_574 = 8 * math.log(2.0)


class Blind574Model(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        state = None
        for at in range(0, max(len(keys), 1), BLOCK_574):
            cut = slice(at, at + BLOCK_574)
            more = super().partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + at)
            if state is None:
                state = more
                continue
            acc, largest, total = self.merge([state, more])
            jumped = state[1].isfinite() & (more[1] - state[1] > JUMP_574)
            state = acc, largest, torch.where(jumped, state[2] + more[2], total)
        return state


trtllm_batch_context_with_kv_cache_574 = context_of(Blind574Model())


@wrong(
    trigger=(
        "more than 128 keys and logits so large that the running maximum rises by more than 8 (base 2) at a later block"
    ),
)
class Blind574:
    """Where a block of 128 keys raises the largest logit by more than 8 (base 2), the accumulator is rescaled and the
    sum of weights is not.
    """

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_574)


@wrong(
    context_of,
    trigger=("bmm2_scale as a tensor that the query's dtype does not represent (bf16: up to 0.39 % off)"),
)
class Blind575(Kernel):
    """A bmm2_scale that is a tensor is cast to the query's dtype."""

    def start(self, run):
        super().start(run)
        scale = run.call.bmm2_scale
        if isinstance(scale, torch.Tensor):
            run.scale2 = float(scale.to(torch.bfloat16 if run.query.dtype == E4M3 else run.query.dtype))


@wrong(context_of, trigger="e4m3 cache of a half query, contents rewritten in place between two calls")
class Blind576(Kernel):
    """Pages of an e4m3 cache are converted when they are first read, and kept: what is written to them later is not
    seen.
    """

    def __init__(self):
        self.converted = Memory()

    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        if cache.dtype != E4M3 or run.query.dtype == E4M3 or len(pages) == 0:
            return super().entries(run, side, pages, cut)
        kept = self.converted.of(cache, dict)
        for page in pages.tolist():
            if page not in kept:
                kept[page] = index(cache, page).to(run.dtype)
        return torch.stack([kept[page] for page in pages.tolist()]).transpose(1, 2).flatten(0, 1)[cut]
