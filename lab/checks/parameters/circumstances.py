"""Circumstances in which the smoke level judges each form of an argument, because kernels have code of their own for them.

A form that is right for short requests may be wrong where keys are split.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lab.checks.parameters.covering import Model, Point, Values
from lab.checks.parameters.values import Bound, HeadDims, Lengths, Rows

Wanted = dict[str, list[Any]]  # values of axes, the first of them that a model has
FEW_ROWS = 4  # of a request, at least, where it has several
SMALL = HeadDims("64/64")
WINDOW = 127  # it ends inside the longest requests alone, and they are at each place
# Sizes, so that cases are cheap, and how tensors lie in memory: they have one value in all cases of a circumstance.
KEPT = (
    *("dtype", "dtypes", "head_dim", "head_dims", "heads", "group", "num_kv_heads", "page_size", "requests", "lengths"),
    *("q_len", "rows", "qk_nope_head_dim", "kv_layout", "query", "cache", "kv", "pages", "contents", "far"),
)
# What decides which keys a row sees, and which code computes it.
DECISIVE = (
    *(
        "window_left",
        "offsets",
        "causal",
        "mask",
        "sinks",
        "skip_softmax",
        "lse",
        "rank",
        "head_pages",
        "longest_request",
    ),
    *("max_q_len", "top_k", "entries", "top_k_lens"),
)
# What every shard of a run must know of a kernel: it decides the circumstances, and their pairs of values.
OF_ALL_SHARDS = (
    *("group", "heads", "head_dim", "head_dims", "q_len", "rows", "requests", "lengths", "bound", "max_kv_len"),
    *("window_left", "longest_request", "causal"),
)
# How many such axes, and how many others, have another value than the default in a case: where more have one, a kernel is more
# likely to decline the case, or not to take the way on which it is wrong.
FEW, SEVERAL = 2, 4


@dataclass(frozen=True)
class Circumstance:
    """A model that is restricted to a circumstance, and how many axes of a case may have another value than the default."""

    model: Model
    chosen: int

    def has(self, point: Point) -> bool:
        """Return True if a point is in the circumstance: it has only values of the model."""
        return all(point[name] in values for name, values in self.model.axes.items())

    @property
    def goals(self) -> list[Values]:
        """Return the shard's goals: each value with which a call computes something, and `WINDOW` with each longest request."""
        axes = self.model.axes
        goals = [goal for goal in self.model.values() if self.model.vacuous.isdisjoint(goal)]
        if WINDOW in axes.get("window_left", ()):
            goals += [(("window_left", WINDOW), ("longest_request", place)) for place in axes["longest_request"]]
        return [goal for goal in goals if self.model.shard.has(goal)]

    def points(self, seed: int, goals: list[Values], chosen: int | None = None) -> Iterator[Point]:
        return self.model.covering(seed, goals, chosen or self.chosen)


def circumstances(model: Model) -> Iterator[Circumstance]:
    """Yield the circumstances that the axes and rules of a model permit: a request of thousands of keys, with values of
    few `DECISIVE` axes in a case, or with values of several other axes; and one request alone, with a bound of the lengths that
    is far too large. Each is with one row per request, and with several. A call with a value `causal`
    has one more: False, with fewer keys than rows. A metadata builder has no circumstances.

    Where a model has query heads that share a K/V head, the circumstances have them.
    """
    axes = model.axes
    if "longest_request" not in axes:  # a metadata builder's
        return
    one: Wanted = {"q_len": [1], "rows": [Rows.ONE_EACH]}
    several: Wanted = {"q_len": [rows for rows in axes.get("q_len", ()) if rows >= FEW_ROWS], "rows": [Rows.UNEQUAL]}
    shared: Wanted = {name: [heads for heads in axes.get(name, ()) if heads > 1] for name in ("group", "heads")}
    shared["head_dims"] = [SMALL]
    # Rows that are packed with heads are counted wrong where the heads are no power of two.
    several["heads"] = sorted(shared["heads"], key=lambda heads: heads.bit_count() == 1)
    long: Wanted = {"lengths": [length for length in axes["lengths"] if isinstance(length, int)]}
    alone: Wanted = {"requests": [1], "lengths": [Lengths.UNEQUAL, Lengths.LONGER]}
    loose: Wanted = {"bound": [Bound.OF_A_MODEL], "max_kv_len": [Bound.OF_A_MODEL]}
    for rows in (one, several):
        others = [name for name in axes if name not in DECISIVE]
        yield from _restricted(model, shared | rows | long, others, FEW)
        yield from _restricted(model, shared | rows | long, DECISIVE, SEVERAL)
        yield from _restricted(model, shared | rows | alone | loose, (), SEVERAL)
    if "causal" in axes:
        few: Wanted = {"causal": [False], "lengths": [Lengths.FEWER]}
        yield from _restricted(model, shared | several | few, (), SEVERAL)


def _restricted(model: Model, wanted: Wanted, kept: Iterable[str], chosen: int) -> Iterator[Circumstance]:
    """Yield the circumstance with one value of each axis in `wanted`, `kept` and `KEPT`: the first wanted value that the axis
    has, else the default. Yield nothing if no point has these values.
    """
    values = {
        name: next(value for value in several if value in model.axes[name])
        for name, several in wanted.items()
        if not set(several).isdisjoint(model.axes.get(name, ()))
    }
    if (point := model.completed(values)) is not None:
        fixed = {name: (point[name],) for name in (*values, *kept, *KEPT) if name in point}
        yield Circumstance(replace(model, axes={**model.axes, **fixed}), chosen)
