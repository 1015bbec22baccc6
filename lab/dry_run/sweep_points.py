"""Choose the calls on which the lab's rules are compared with FlashInfer's launcher (the sweep). A *point* describes one call:
it has a value for each *axis*, which is an argument.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lab.calls.problem import AttentionCall
from lab.checks.parameters.covering import Model, Point
from lab.dry_run import sweep_calls, sweep_dsv4, sweep_ragged

PAGED_BASES: tuple[Point, ...] = (
    {},
    {"dtypes": "e4m3/nvfp4/e4m3"},
    {"dtypes": "e4m3/nvfp4/e4m3", "head_dim": 64, "page_size": 16},
    {"dtypes": "e4m3/e4m3/fp16", "head_dim": 256},
    {"dtypes": "fp16/fp16/fp16", "head_dim": 64, "page_size": 128},
    {"head_dim": 512, "page_size": 32},
)


@dataclass(frozen=True)
class SweptCall:
    model: Model  #: the axes of the call, with constraints on their values
    bases: tuple[Point, ...]  #: points that trtllm-gen supports. A random point differs from one of them on some axes.
    make: Callable[[Point], Any]  #: returns the call that a point describes, as an object of its class in `lab.calls`


SWEPT: Mapping[AttentionCall, SweptCall] = {
    AttentionCall.DECODE: SweptCall(
        sweep_calls.DECODE, (*PAGED_BASES, {"dtypes": "fp16/e4m3/fp16"}, {"q_len": 4, "group": 16}), sweep_calls.decode
    ),
    AttentionCall.CONTEXT: SweptCall(
        sweep_calls.CONTEXT,
        (*PAGED_BASES, {"head_dim": 80, "q_len": 64}, {"q_len": 150, "causal": False}),
        sweep_calls.context,
    ),
    AttentionCall.MLA_DECODE: SweptCall(
        sweep_calls.MLA_DECODE,
        (
            {},
            {"dims": (256, 64), "heads": 32},
            {"dtypes": "e4m3/e4m3/bf16", "heads": 16, "q_len": 4},
            {"top_k": 2048},
            {"dims": (512, 0), "top_k": 64, "lens": True},
        ),
        sweep_calls.mla_decode,
    ),
    AttentionCall.RAGGED_CONTEXT: SweptCall(
        sweep_ragged.RAGGED_CONTEXT, sweep_ragged.BASES, sweep_ragged.ragged_context
    ),
    AttentionCall.DSV4_DECODE: SweptCall(sweep_dsv4.DSV4_DECODE, sweep_dsv4.BASES, sweep_dsv4.dsv4_decode),
}


def points(call: AttentionCall, drawn: int, seed: int = 0) -> Iterator[Point]:
    """Yield distinct calls: with at most one non-default value, with all values of three axes (`Model.triples`), random."""
    model, rng = SWEPT[call].model, random.Random(f"{call.name} {seed}")
    grids = (
        model.completed(dict(zip(names, values, strict=True)))
        for names in model.triples
        for values in itertools.product(*(model.axes[name] for name in names))
    )
    found = set[str]()
    for point in itertools.chain(model.alone(), grids, (_drawn(call, rng) for _ in range(drawn))):
        if point is not None and repr(point) not in found:
            found.add(repr(point))
            yield point


def _drawn(call: AttentionCall, rng: random.Random) -> Point | None:
    model = SWEPT[call].model
    names = rng.sample(list(model.axes), rng.randint(1, 5))
    return model.completed(rng.choice(SWEPT[call].bases) | {name: rng.choice(model.axes[name]) for name in names})
