"""Wrong kernels of the ragged context call, written without a look at the checks: numbers 555 to 585."""

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, assuming_strides, ragged_of


@wrong(
    ragged_of,
    trigger=(
        "bmm1_scale a tensor that the query's dtype does not represent (DeepSeek's YaRN scale), with large logits:"
        " the LSE is off by 0.35 % of a logit; the output too where keys compete"
    ),
)
class Blind555(Kernel):
    """A bmm1_scale that is a tensor is cast to the query's dtype before it multiplies the logits."""

    def start(self, run):
        super().start(run)
        scale = run.call.bmm1_scale
        if isinstance(scale, torch.Tensor):
            run.scale1 = float(scale.to(torch.bfloat16 if run.query.dtype == E4M3 else run.query.dtype))


@wrong(ragged_of, trigger="value a slice of more heads: token stride is not heads × head stride")
class Blind582(Kernel):
    """The tokens of V are taken to be as far apart as its heads take up."""

    def start(self, run):
        super().start(run)
        value = run.value
        run.value = assuming_strides(value, (value.shape[1] * value.stride(1), value.stride(1), 1))


@wrong(ragged_of, trigger="kv_seq_lens_cpu in int64 with two or more requests")
class Blind583(Kernel):
    """The key lengths on the host, where there are any, are read as int32."""

    def start(self, run):
        super().start(run)
        mirror = run.call.kv_seq_lens_cpu
        if mirror is not None:
            lens = mirror.view(torch.int32)[: run.batch].tolist()
            run.lens = [min(n, len(run.key) - first) for n, first in zip(lens, run.kv_offsets)]


@wrong(ragged_of, trigger="more than 256 requests")
class Blind584(Kernel):
    """A tile's request is packed into 8 bits for the loads of K and V: request 256 and later read those of request r -
    256.
    """

    def start(self, run):
        super().start(run)
        run.lens = [run.lens[r % 256] for r in range(run.batch)]
        run.kv_offsets = [run.kv_offsets[r % 256] for r in range(run.batch)]


@wrong(ragged_of, trigger="lse given with return_lse=False")
class Blind585(Kernel):
    """A given lse is written only with return_lse."""

    def start(self, run):
        super().start(run)
        if not run.call.return_lse:
            run.lse = None

    def solve(self, run):
        given = run.lse
        if not run.call.return_lse:
            run.lse = None
        super().solve(run)
        run.lse = given
