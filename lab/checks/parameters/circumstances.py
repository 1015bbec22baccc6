"""Find groups of calls for which kernels have separate code, such as calls with a request of thousands of keys."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.checks.parameters.covering import Model, Point, Values
from lab.checks.parameters.values import Bound, DtypePair, HeadDims, Lengths, LogitScale, Offsets, Rows

Wanted = dict[str, list[Any]]  # for an axis, its wanted values in order of preference
FEW_ROWS = 4  # least number of query rows of a request with several rows
SMALL = HeadDims("64/64")
WINDOW = 127  # shorter than the longest request, longer than most other requests
# Dtypes of a query and a cache that have scales of their own
QUANTISED = (DtypePair("e4m3/e4m3"), DtypePair("bf16/nvfp4"))
# Axes of sizes: they have one value in all cases of a circumstance, so that cases are cheap.
OF_SIZE = (
    *("dtype", "dtypes", "head_dim", "head_dims", "heads", "group", "num_kv_heads", "page_size", "requests", "lengths"),
    *("q_len", "rows", "qk_nope_head_dim", "pages", "contents", "far"),
)
LAYOUTS = ("kv_layout", "query", "cache", "kv")  # have one value in all cases of most circumstances
# Axes that decide which keys a row sees, and which code computes the row.
DECISIVE = (
    *("window_left", "offsets", "causal", "mask", "sinks", "skip_softmax", "lse", "rank", "head_pages"),
    *("longest_request", "max_q_len", "top_k", "entries", "top_k_lens"),
)
# Axes with values for which kernels have separate code in every circumstance, such as calls in which rows select entries.
OWN_CODE = ("top_k", "entries", "top_k_lens", "head_pages", "rank", "mask")
# Axes that decide which circumstances a kernel has. A shard (one part of a run that several machines share) needs all of them.
OF_ALL_SHARDS = (
    *("group", "heads", "head_dim", "head_dims", "q_len", "rows", "requests", "lengths", "bound", "max_kv_len"),
    *("window_left", "longest_request", "causal", "dtypes", "offsets", "mode"),
)
# Number of axes with values other than the default in a case: of DECISIVE axes, and of other axes. With more such values, a
# kernel is more likely to decline the case or to run other code than the wrong one.
FEW, SEVERAL = 2, 4
# Combinations of values at the limits of a dtype: products q·k beyond float16's largest number, and weights below e4m3's
# smallest one. The axis of the query's dtype is "dtype" in the ragged call.
AT_LIMITS: tuple[Point, ...] = (
    {"dtypes": DtypePair("fp16/fp16"), "bmm1_scale": LogitScale.SMALL},
    {"dtype": "fp16", "bmm1_scale": LogitScale.SMALL},
    {"dtypes": DtypePair("e4m3/e4m3"), "contents": "shaded"},
)


def at_limits(model: Model) -> Iterator[Point]:
    for each in AT_LIMITS:
        has = all(value in model.axes.get(name, ()) for name, value in each.items())
        if has and model.shard.has(tuple(each.items())) and (point := model.completed(each)) is not None:
            yield point


@dataclass(frozen=True)
class Circumstance:
    model: Model  # permits only calls of the group
    chosen: int  # number of axes of a case that may have other values than the default

    def has(self, point: Point) -> bool:
        return all(point[name] in values for name, values in self.model.axes.items())

    @property
    def goals(self) -> list[Values]:
        # Each value, and each pair of a window and a position of the longest request in the batch.
        axes = self.model.axes
        goals = [goal for goal in self.model.values() if self.model.vacuous.isdisjoint(goal)]
        if WINDOW in axes.get("window_left", ()):
            goals += [(("window_left", WINDOW), ("longest_request", place)) for place in axes["longest_request"]]
        return [goal for goal in goals if self.model.shard.has(goal)]


def circumstances(model: Model) -> Iterator[Circumstance]:
    """Yield groups of calls for which kernels have separate code, if the model permits them. For a builder of metadata, each
    forward mode is a group: its passes in which at most four parameters differ from their default.

    Other functions have these groups. Groups 1 to 4 exist twice: with one query row per request, and with several.
    1. A request has thousands of keys. At most two parameters (`FEW`) differ from their default. They are in `DECISIVE`, such
       as "sinks", and not in `OWN_CODE`, such as "mask".
    2. As group 1, but the two parameters may also be in `OWN_CODE`. Without such parameters, there is no group 1.
    3. A request has thousands of keys. At most four parameters (`SEVERAL`) not in `DECISIVE` differ from their default.
    4. The batch has one request, and the upper bound of the lengths that is passed as a number is far too large.
    5. Unequal numbers of rows, if the model has "offsets". At most four parameters in `DECISIVE` differ from their default.
    6. Quantised queries or caches, a group for each pair in `QUANTISED`. The parameters that differ are not in `DECISIVE`.
    7. Non-causal calls with fewer keys than rows, if the model has "causal".
    In all groups, several query heads share a K/V head if the model has such values.
    """
    axes = model.axes
    if "longest_request" not in axes:  # a metadata builder
        for mode in axes.get("mode", ()):
            yield from _restricted(model, {"mode": [mode]}, (), SEVERAL)
        return
    one: Wanted = {"q_len": [1], "rows": [Rows.ONE_EACH]}
    several: Wanted = {"q_len": [rows for rows in axes.get("q_len", ()) if rows >= FEW_ROWS], "rows": [Rows.UNEQUAL]}
    shared: Wanted = {name: [heads for heads in axes.get(name, ()) if heads > 1] for name in ("group", "heads")}
    shared["head_dims"] = [SMALL]
    # Prefer a number of heads that is no power of two, and a multiple of a small one alone, such as 20: kernels that pack rows
    # and heads together, or that compute blocks of heads, may divide wrongly.
    several["heads"] = sorted(shared["heads"], key=lambda heads: (heads.bit_count() == 1, heads & -heads))
    long: Wanted = {"lengths": [length for length in axes["lengths"] if isinstance(length, int)]}
    alone: Wanted = {"requests": [1], "lengths": [Lengths.UNEQUAL, Lengths.LONGER]}
    loose: Wanted = {"bound": [Bound.OF_A_MODEL], "max_kv_len": [Bound.OF_A_MODEL]}
    others = [name for name in axes if name not in DECISIVE]
    for rows in (one, several):
        if not axes.keys().isdisjoint(OWN_CODE):
            yield from _restricted(model, shared | rows | long, (*others, *OWN_CODE), FEW)
        yield from _restricted(model, shared | rows | long, others, FEW)
        yield from _restricted(model, shared | rows | long, DECISIVE, SEVERAL)
        yield from _restricted(model, shared | rows | alone | loose, (), SEVERAL)
    if Offsets.UNEQUAL in axes.get("offsets", ()):
        yield from _restricted(model, shared | several | {"offsets": [Offsets.UNEQUAL]}, others, SEVERAL)
    for dtypes in (each for each in QUANTISED if each in axes.get("dtypes", ())):
        yield from _restricted(model, shared | {"dtypes": [dtypes]}, DECISIVE, SEVERAL, layouts=())
    if "causal" in axes:
        few: Wanted = {"causal": [False], "lengths": [Lengths.FEWER]}
        yield from _restricted(model, shared | several | few, (), SEVERAL)


def _restricted(
    model: Model, wanted: Wanted, kept: Iterable[str], chosen: int, layouts: Sequence[str] = LAYOUTS
) -> Iterator[Circumstance]:
    values = {
        name: next(value for value in several if value in model.axes[name])
        for name, several in wanted.items()
        if not set(several).isdisjoint(model.axes.get(name, ()))
    }
    if (point := model.completed(values)) is not None:
        fixed = {name: (point[name],) for name in (*values, *kept, *OF_SIZE, *layouts) if name in point}
        yield Circumstance(replace(model, axes={**model.axes, **fixed}), chosen)
