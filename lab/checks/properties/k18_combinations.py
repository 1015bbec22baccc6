"""Find errors for values, forms of arguments, and pairs of these that no other check has, by covering arrays of all calls.

A kernel branches on its arguments, and many errors need a combination of two values: a window with separate page tables, a mask
with sinks, a group of 12 in a batch of 257. A case is a value for each axis (parameter) of the call's model.

* Quick level: cases of many values. Then, for values not yet judged: cases of usual values, and cases with at most four values
  or one value that is not the default.
* Smoke level: each value alone, and at the limits of a dtype. Then each form of an argument in the circumstances for which
  kernels have separate code (`lab.checks.parameters.circumstances`), several forms in one case.
* Full level: also each pair of values and each declared triple. A value that was declined alone is tried with every other
  value. A pair that no judged case contains is tried in cases with more default values, and finally alone.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.parameters.calls import judge_call
from lab.checks.parameters.circumstances import OF_ALL_SHARDS, at_limits, circumstances
from lab.checks.parameters.coverage import retried, tuples_by_outcome
from lab.checks.parameters.covering import Model, Point, Shard, Values
from lab.checks.parameters.metadata import judge_metadata
from lab.checks.parameters.metadata_axes import METADATA
from lab.checks.parameters.models import MODELS, Configuration
from lab.checks.parameters.paged_calls import attention_case
from lab.checks.parameters.sampling import DrawnPoint, samples
from lab.checks.parameters.values import DtypePair
from lab.checks.properties.check import Check, Level, Scope
from lab.checks.properties.draft_lists import judge_lists
from lab.checks.run.verdicts import CaseVerdict
from lab.ranges import SEEDS, Ranges
from lab.workloads.interfaces import PAGED_CALLS, Interface, MetadataFunction

# For each further round of the full level: the most axes of a case with other values than the default; None for all axes. With
# fewer such axes a kernel is more likely to accept the case.
CHOSEN = (None, None, 6, 4)
# Most multiplications of Q·K^T in a case of the quick level's first two rounds. Larger cases come in later rounds.
MOST_PRODUCTS = 2**24
E4M3_QUERIES = DtypePair("e4m3/e4m3")  # a value of the axis "dtypes"


class UsualRanges(Ranges):
    """Parameter values without the unusual ones that the check K18 adds to default ranges and that kernels often decline."""

    def widened(self, name: str) -> tuple[Any, ...]:
        values: tuple[Any, ...] = getattr(self, name)
        return values


def _cases(scope: Scope) -> Iterator[Configuration]:
    interface, ranges = scope.interface, scope.ranges
    model = _model(interface, ranges, scope.shard)
    if scope.level is Level.QUICK:
        many = model.covering(ranges.seed, model.values())
        yield from _cheapest_first(_numbered(interface, ranges, many), ranges, MOST_PRODUCTS)
        return
    points = [*model.alone(of_all=OF_ALL_SHARDS), *at_limits(model)]
    for number, each in enumerate(circumstances(model)):
        points += each.points(SEEDS * ranges.seed + number, each.goals)
    yield from _numbered(interface, ranges, points)
    if scope.is_full:
        covered = {each for point in points for each in model.tuples_of(point)}
        goals = (goal for goal in model.tuples() if goal not in covered)
        yield from _numbered(interface, ranges, model.covering(ranges.seed, goals))


def _numbered(interface: Interface, ranges: Ranges, points: Iterable[Point]) -> Iterator[Configuration]:
    for seed, point in enumerate(points, SEEDS * ranges.seed):
        yield Configuration(interface, point, seed)


def _model(interface: Interface, ranges: Ranges, shard: Shard) -> Model:
    model = MODELS[interface](ranges)
    return model if shard == model.shard else replace(model, shard=shard)


def _with_declined_values(
    interface: Interface, ranges: Ranges, verdicts: Sequence[CaseVerdict], shard: Shard
) -> Iterator[Configuration]:
    """Yield cases that combine each value that was always declined so far with every value that was judged. If an axis has no
    judged value, yield cases that contain all pairs and declared triples instead.
    """
    model = _model(interface, ranges, shard)
    judged, declined = tuples_by_outcome(model, verdicts)
    if (taken := model.only(judged)) is None:
        yield from _new_cases(interface, ranges, model.covering(ranges.seed), verdicts)
        return
    for axis, values in model.axes.items():
        for value in values:
            if ((axis, value),) in declined - judged:
                wider = replace(taken, axes={**taken.axes, axis: (*taken.axes[axis], value)})
                pairs = (goal for goal in wider.tuples() if len(goal) == 2 and (axis, value) in goal)
                yield from _new_cases(interface, ranges, wider.covering(ranges.seed, pairs), verdicts)


def _left_in_circumstances(
    chosen: int | None, interface: Interface, ranges: Ranges, verdicts: Sequence[CaseVerdict], shard: Shard
) -> Iterator[Configuration]:
    """Yield cases for values that were judged, but not in each circumstance (such as long requests), because a case was
    declined for another of its values. At most `chosen` axes differ from their default; None: at most `Circumstance.chosen`.
    """
    model = _model(interface, ranges, shard)
    taken = model.only(tuples_by_outcome(model, verdicts)[0])
    for each in () if taken is None else circumstances(taken):
        in_it = [verdict for verdict in verdicts if each.has(verdict.case.values)]
        judged = tuples_by_outcome(each.model, in_it)[0]
        goals = [goal for goal in each.goals if goal not in judged]
        yield from _new_cases(interface, ranges, each.points(ranges.seed, goals, chosen), verdicts)


def _again(
    chosen: int | None, interface: Interface, ranges: Ranges, verdicts: Sequence[CaseVerdict], shard: Shard
) -> Iterator[Configuration]:
    """Yield cases that together contain all pairs and triples of judged values that no judged case contains yet. At most
    `chosen` axes of a case differ from their default; None for all axes.
    """
    if (found := retried(_model(interface, ranges, shard), verdicts)) is not None:
        taken, goals = found
        yield from _new_cases(interface, ranges, taken.covering(ranges.seed, goals, chosen), verdicts)


def _alone(
    interface: Interface, ranges: Ranges, verdicts: Sequence[CaseVerdict], shard: Shard
) -> Iterator[Configuration]:
    """Yield a case for each pair and triple of judged values that no judged case contains yet, with all other axes at their
    default. A triple is left out if one of its pairs gets a case.
    """
    if (found := retried(_model(interface, ranges, shard), verdicts)) is not None:
        taken, goals = found
        left = set(goals)
        least = (goal for goal in goals if len(goal) == 2 or not left & set(itertools.combinations(goal, 2)))
        points = (taken.completed(dict(goal)) for goal in least)
        yield from _new_cases(interface, ranges, (point for point in points if point is not None), verdicts)


def _usual_model(interface: Interface, ranges: Ranges) -> Model:
    return MODELS[interface](UsualRanges(**{each.name: getattr(ranges, each.name) for each in fields(ranges)}))


def _usual_values(
    interface: Interface, ranges: Ranges, verdicts: Sequence[CaseVerdict], _shard: Shard
) -> Iterator[Configuration]:
    """Yield cases that together contain each usual value (`UsualRanges`) that was not judged yet, and no unusual value."""
    usual = _usual_model(interface, ranges)
    judged, _ = tuples_by_outcome(MODELS[interface](ranges), verdicts)
    points = usual.covering(ranges.seed, [goal for goal in usual.values() if goal not in judged])
    yield from _cheapest_first(_new_cases(interface, ranges, points, verdicts), ranges, MOST_PRODUCTS)


def _left_values(
    chosen: int, interface: Interface, ranges: Ranges, verdicts: Sequence[CaseVerdict], _shard: Shard
) -> Iterator[Configuration]:
    """Yield cases that together contain each value that no judged case contains yet and, if the kernel accepts e4m3 queries,
    each usual size with e4m3 queries. At most `chosen` values of a case are not defaults. If the kernel declines a default,
    the first value that it accepts is the default instead.
    """
    model = MODELS[interface](ranges)
    judged, _ = tuples_by_outcome(model, verdicts)
    with_sizes = _e4m3_queries_with_sizes(_usual_model(interface, ranges)) if interface in PAGED_CALLS else ()
    of_e4m3 = [goal for goal in with_sizes if goal[:1] in judged]
    goals = [goal for goal in (*model.values(), *of_e4m3) if goal not in judged]
    # A kernel may decline a default, such as bf16 queries.
    taken = {value for (value, *more) in judged if not more} - model.vacuous
    taken_first = {
        name: sorted(values, key=[each for each in values if (name, each) not in taken].__contains__)
        for name, values in model.axes.items()
    }
    points = replace(model, axes=taken_first).covering(ranges.seed, goals, chosen)
    yield from _cheapest_first(_new_cases(interface, ranges, points, verdicts), ranges)


def _e4m3_queries_with_sizes(model: Model) -> Iterator[Values]:
    for name in ("head_dims", "head_dim", "page_size"):
        yield from ((("dtypes", E4M3_QUERIES), (name, size)) for size in model.axes.get(name, ()))


def _cheapest_first(cases: Iterable[Configuration], ranges: Ranges, most: float = math.inf) -> list[Configuration]:
    """Sort cases of paged calls by the number of multiplications in Q·K^T, without those above `most`. Cases of other calls
    come first.
    """

    def num_products(case: Configuration) -> int:
        if case.interface not in PAGED_CALLS:
            return 0
        call = attention_case(case, ranges)
        return sum(map(operator.mul, call.q_lens, call.kv_lens)) * call.num_qo_heads * call.head_dim

    counted = sorted(((num_products(case), case) for case in cases), key=operator.itemgetter(0))
    return [case for count, case in counted if count <= most]


def _new_cases(
    interface: Interface, ranges: Ranges, points: Iterable[Point], verdicts: Sequence[CaseVerdict]
) -> Iterator[Configuration]:
    before = {repr(replace(verdict.case, seed=0)) for verdict in verdicts}
    for case in _numbered(interface, ranges, points):
        if repr(replace(case, seed=0)) not in before:
            before.add(repr(replace(case, seed=0)))
            yield case


def _draw_on(interface: Interface, ranges: Ranges, verdicts: Sequence[CaseVerdict]) -> Iterator[DrawnPoint]:
    if (found := retried(MODELS[interface](ranges), verdicts)) is not None:
        seed = f"{interface.name} {ranges.seed}"
        yield from samples(found[0], seed, partial(Configuration, interface), fewest=2)


JUDGES: dict[Interface, Callable[[CaseRun], None]] = {
    **dict.fromkeys(AttentionCall, judge_call),
    MetadataFunction.DRAFT_KV_INDICES: judge_lists,
    **dict.fromkeys(METADATA, judge_metadata),
}


def _judge(run: CaseRun) -> None:
    JUDGES[run.case.interface](run)


IN_CIRCUMSTANCES = tuple(partial(_left_in_circumstances, chosen) for chosen in (None, 1))
CHECK = Check(
    "K18",
    __doc__,
    _cases,
    _judge,
    interfaces=tuple(MODELS),
    more={
        Level.QUICK: (_usual_values, partial(_left_values, CHOSEN[-1]), partial(_left_values, 1)),
        Level.SMOKE: IN_CIRCUMSTANCES,
        Level.FULL: (*IN_CIRCUMSTANCES, _with_declined_values, *(partial(_again, chosen) for chosen in CHOSEN), _alone),
    },
    draw_on=_draw_on,
)
