"""Find errors that occur only with certain values or forms of arguments, or with pairs of them, by covering arrays.

A kernel branches on its arguments, and many errors need two values at once: a window with separate page tables, a mask with
sinks, 12 query heads per K/V head in a batch of 257. A case has a value for each axis (parameter) of the call's model. A
covering array is a small set of cases that has every value, or every pair of values.

* Quick level: cases of many values. Then, for values without a judged case: cases of usual values, and cases with at most four
  values, or with one value, other than the default.
* Smoke level: each value alone, and values at the limits of a dtype. Then each form of an argument in the circumstances for
  which kernels have separate code (`lab.checks.parameters.circumstances`), several forms in one case.
* Full level: also each pair of values and each declared triple. A value whose cases were all declined is tried with every other
  value. A pair without a judged case is tried in cases with more default values, and finally alone.
* Smoke and full level, if a case is wrong, after all checks' other cases: also simpler cases, then few cases with its unusual
  values and all values of other axes, then variants in which one parameter differs, then with two more seeds the right cases
  with one unusual value more or less. If only cases of other checks are wrong: a case with the parameter values of each of a
  few wrong results. These cases are for the diagnosis.
"""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.explain.feature import HIDING, of_any_request
from lab.checks.parameters.calls import judge_call
from lab.checks.parameters.circumstances import OF_ALL_SHARDS, at_limits, circumstances
from lab.checks.parameters.coverage import retried, tuples_by_outcome
from lab.checks.parameters.covering import Model, Point
from lab.checks.parameters.metadata import judge_metadata
from lab.checks.parameters.metadata_axes import METADATA
from lab.checks.parameters.models import MODELS, Configuration
from lab.checks.parameters.paged_axes import ONE_ROW_OF_RANK, SHORT
from lab.checks.parameters.paged_calls import attention_case
from lab.checks.parameters.sampling import DrawnPoint, samples
from lab.checks.parameters.values import Bound, DtypePair, Lse, Offsets, Sinks, Tables
from lab.checks.properties.check import Check, Following, Level, Scope
from lab.checks.properties.draft_lists import judge_lists
from lab.checks.run.verdicts import CaseVerdict, Outcome
from lab.ranges import SEEDS, Ranges
from lab.workloads.interfaces import PAGED_CALLS, Interface, MetadataFunction

# For each further round of the full level: the most axes of a case with other values than the default; None for all axes. With
# fewer such axes a kernel is more likely to accept the case.
CHOSEN = (None, None, 6, 4)
# Most multiplications of Q·K^T in a case of the quick level's first two rounds. Larger cases come in later rounds.
MOST_PRODUCTS = 2**24
MOST_SUBJECTS = 2  # wrong cases near which further cases are judged
MOST_VARIED = 80  # variants of a wrong case
FIRST_DIVIDED = tuple(2**power + 1 for power in range(6, 12))  # keys: the first numbers that a kernel may divide
MOST_ALIKE = 8  # cases with the values of other checks' wrong results
E4M3_QUERIES = ("dtypes", DtypePair("e4m3/e4m3"))


class UsualRanges(Ranges):
    """Ranges without the unusual values, such as head_dim 512, that check K18 adds to the default ranges."""

    def widened(self, name: str) -> tuple[Any, ...]:
        values: tuple[Any, ...] = getattr(self, name)
        return values


def _cases(scope: Scope) -> Iterator[Configuration]:
    model, seed = _model(scope), scope.ranges.seed
    if scope.level is Level.QUICK:
        many = model.covering(seed, model.values())
        yield from _cheapest_first(_numbered(scope, many), scope.ranges, MOST_PRODUCTS)
        return
    points = [*model.alone(of_all=OF_ALL_SHARDS), *at_limits(model)]
    for number, each in enumerate(circumstances(model)):
        met = {values for point in points if each.has(point) for values in each.model.tuples_of(point)}
        unmet = [goal for goal in each.goals if goal not in met]
        points += each.model.covering(SEEDS * seed + number, unmet, each.chosen)
    yield from _numbered(scope, points)
    if scope.is_full:
        covered = {each for point in points for each in model.tuples_of(point)}
        yield from _numbered(scope, model.covering(seed, model.tuples(covered)))


def _numbered(scope: Scope, points: Iterable[Point]) -> Iterator[Configuration]:
    for seed, point in enumerate(points, SEEDS * scope.ranges.seed):
        yield Configuration(scope.interface, point, seed)


def _model(scope: Scope) -> Model:
    model = MODELS[scope.interface](scope.ranges)
    return model if scope.shard == model.shard else replace(model, shard=scope.shard)


def _with_declined_values(scope: Scope, verdicts: Sequence[CaseVerdict]) -> Iterator[Configuration]:
    """For each parameter value that the kernel declined in all cases, yield cases that pair it with each accepted value of the
    other parameters, because the kernel may decline only some of these pairs. If a parameter has no accepted value, yield cases
    for all pairs of values instead.
    """
    model, seed = _model(scope), scope.ranges.seed
    judged, declined = tuples_by_outcome(model, verdicts)
    if (taken := model.only(judged)) is None:  # an axis has no judged value
        yield from _new_cases(scope, model.covering(seed), verdicts)
        return
    for axis, values in model.axes.items():
        for value in values:
            if ((axis, value),) in declined - judged:
                wider = replace(taken, axes={**taken.axes, axis: (*taken.axes[axis], value)})
                pairs = (goal for goal in wider.tuples() if len(goal) == 2 and (axis, value) in goal)
                yield from _new_cases(scope, wider.covering(seed, pairs), verdicts)


def _left_in_circumstances(
    chosen: int | None, scope: Scope, verdicts: Sequence[CaseVerdict]
) -> Iterator[Configuration]:
    """For each circumstance, such as long requests, yield cases in it with values that were judged only outside of it. At
    most `chosen` values of a case are not defaults (None: as many as the circumstance permits).
    """
    model = _model(scope)
    taken = model.only(tuples_by_outcome(model, verdicts)[0])
    for each in () if taken is None else circumstances(taken):
        in_it = [verdict for verdict in verdicts if each.has(verdict.case.values)]
        judged = tuples_by_outcome(each.model, in_it)[0]
        goals = [goal for goal in each.goals if goal not in judged]
        points = each.model.covering(scope.ranges.seed, goals, chosen or each.chosen)
        yield from _new_cases(scope, points, verdicts)


def _again(chosen: int | None, scope: Scope, verdicts: Sequence[CaseVerdict]) -> Iterator[Configuration]:
    """Yield cases with pairs and triples of judged values that no judged case has. At most `chosen` values are not defaults."""
    taken, goals = retried(_model(scope), verdicts)
    if taken is not None:
        yield from _new_cases(scope, taken.covering(scope.ranges.seed, goals, chosen), verdicts)


def _alone(scope: Scope, verdicts: Sequence[CaseVerdict]) -> Iterator[Configuration]:
    """For each pair or triple of judged values that no judged case has, yield a case whose other values are defaults."""
    taken, goals = retried(_model(scope), verdicts)
    if taken is not None:
        left = set(goals)  # a triple gets no case if one of its pairs gets one
        least = (goal for goal in goals if len(goal) == 2 or not left & set(itertools.combinations(goal, 2)))
        yield from _new_cases(scope, filter(None, (taken.completed(dict(goal)) for goal in least)), verdicts)


def _usual_model(scope: Scope) -> Model:
    return MODELS[scope.interface](UsualRanges(**vars(scope.ranges)))


def _usual_values(scope: Scope, verdicts: Sequence[CaseVerdict]) -> Iterator[Configuration]:
    usual = _usual_model(scope)
    judged, _ = tuples_by_outcome(_model(scope), verdicts)
    points = usual.covering(scope.ranges.seed, [goal for goal in usual.values() if goal not in judged])
    yield from _cheapest_first(_new_cases(scope, points, verdicts), scope.ranges, MOST_PRODUCTS)


def _left_values(chosen: int, scope: Scope, verdicts: Sequence[CaseVerdict]) -> Iterator[Configuration]:
    """Yield cases with the values that have no judged case yet. At most `chosen` values of a case are not defaults."""
    model = _model(scope)
    judged, _ = tuples_by_outcome(model, verdicts)
    sizes = _usual_model(scope).axes if scope.interface in PAGED_CALLS and (E4M3_QUERIES,) in judged else {}
    # If the kernel accepts e4m3 queries, each usual size with such queries.
    of_e4m3 = (
        (E4M3_QUERIES, (name, size)) for name in ("head_dims", "head_dim", "page_size") for size in sizes.get(name, ())
    )
    goals = [goal for goal in (*model.values(), *of_e4m3) if goal not in judged]
    # A kernel may decline a default, such as bf16 queries.
    taken = {value for (value, *more) in judged if not more} - model.vacuous
    taken_first = {
        name: sorted(values, key=[each for each in values if (name, each) not in taken].__contains__)
        for name, values in model.axes.items()
    }
    points = replace(model, axes=taken_first).covering(scope.ranges.seed, goals, chosen)
    yield from _cheapest_first(_new_cases(scope, points, verdicts), scope.ranges)


def _cheapest_first(cases: Iterable[Configuration], ranges: Ranges, most: float = math.inf) -> list[Configuration]:
    def num_products(case: Configuration) -> int:  # multiplications of Q·K^T
        if case.interface not in PAGED_CALLS:
            return 0
        call = attention_case(case, ranges)
        return sum(map(operator.mul, call.q_lens, call.kv_lens)) * call.num_qo_heads * call.head_dim

    counted = sorted(((num_products(case), case) for case in cases), key=operator.itemgetter(0))
    return [case for count, case in counted if count <= most]


def _new_cases(scope: Scope, points: Iterable[Point], verdicts: Sequence[CaseVerdict]) -> Iterator[Configuration]:
    return _new(_numbered(scope, points), verdicts)


def _new(cases: Iterable[Configuration], verdicts: Sequence[CaseVerdict]) -> Iterator[Configuration]:
    before = {verdict.case.without_seed for verdict in verdicts}
    for case in cases:
        if case.without_seed not in before:
            before.add(case.without_seed)
            yield case


def _nearby(scope: Scope, verdicts: Sequence[CaseVerdict]) -> Iterable[Configuration]:
    """Yield cases near the simplest wrong cases, to show which values make them wrong: (1) variants with simpler values; if
    none is new, (2) cases that keep the non-default values and together have all values of the other axes; else (3) variants
    with one changed value; else (4) with two changed numbers; else (5) the right cases that differ in one value, with two new
    seeds each. If no case of K18 is wrong, start from cases with the values of other checks' wrong results (`_alike`).
    """
    own = [verdict for verdict in verdicts if verdict.check == CHECK.key]
    model, wrong = _model(scope), [verdict.case for verdict in own if verdict.is_wrong_alone]
    around = partial(_around, scope)
    if not wrong:
        alike = [*itertools.islice(_new(_alike(scope, verdicts), ()), MOST_ALIKE)]
        return _first_new(scope, own, alike, itertools.chain.from_iterable(map(around, _simplest(alike))))
    simplest, reprs = _simplest(wrong), {case.without_seed for case in wrong}
    make = partial(Configuration, scope.interface)
    samples_of_wrong = (DrawnPoint(model, case.values, case.seed, make) for case in simplest)
    simpler = (each.case for sample in samples_of_wrong for each in _simpler(sample, reprs))
    rounds = (around, partial(_varied, scope, wrong=wrong), partial(_resized, scope))
    further = (itertools.chain.from_iterable(map(cases_near, simplest)) for cases_near in rounds)
    if chosen := _first_new(scope, own, simpler, *further):
        return chosen
    judged, values = Counter(each.case.without_seed for each in own), [case.non_default.items() for case in simplest]
    right = (each.case for each in own if each.outcome is Outcome.RIGHT and judged[each.case.without_seed] == 1)
    near = [case for case in right if any(len(case.non_default.items() ^ each) == 1 for each in values)]
    return (replace(case, seed=case.seed + number) for case in near for number in (1, 2))


def _first_new(scope: Scope, verdicts: Sequence[CaseVerdict], *several: Iterable[Configuration]) -> list[Configuration]:
    """Return the cases without a verdict in the first of `several` that has such cases; [] if none has."""
    for cases in several:
        if chosen := [*filter(scope.is_chosen, _new(cases, verdicts))]:
            return chosen
    return []


def _alike(scope: Scope, verdicts: Sequence[CaseVerdict]) -> Iterator[Configuration]:
    """For each wrong result of any check, yield a case of K18 with its parameter values, but defaults for those in `HIDING`."""
    model = _model(scope)
    for result in (each for verdict in verdicts for each in verdict.judged.results if each.wrong):
        read: dict[str, Any] = of_any_request(result.features, [features for features, _ in result.requests])
        read |= {"dtypes": f"{read['dtype']}/{read['kv_dtype']}"} if "kv_dtype" in read else {}
        read |= {"heads": read.get("num_qo_heads")}
        read |= {"head_dims": f"{read.get('head_dim')}/{read.get('v_head_dim')}", "causal": "not_causal" not in read}
        read |= {"sinks": Sinks.PER_HEAD if "sinks" in read else Sinks.NONE}
        read |= {"lse": Lse.BASE_E if "lse_base_e" in read else Lse.RETURNED if "return_lse" in read else Lse.NONE}
        read |= {"backend": "trtllm-gen"} if "interleaved_factors" in read else {}
        read |= {"block_tables": Tables.SEPARATE} if "separate_tables" in read else {}
        has_offsets = "cum_seq_lens_q_given" in read
        read |= {"offsets": Offsets.UNEQUAL if "unequal_q_lens" in read else Offsets.EQUAL} if has_offsets else {}
        read |= {"max_q_len": Bound.NONE if has_offsets and "max_q_len_given" not in read else Bound.EXACT}
        read |= {"rank": f"{read.get('rank')} of {read.get('ranks')}", "lengths": read.get("longest_kv_len", 0)}
        long = [each for each in model.axes.get("lengths", ()) if type(each) is int and read["lengths"] > SHORT]
        read["lengths"] = max([read["lengths"], *sorted(long)[:1]])
        point: Point = {}
        for axis, values in model.axes.items():
            given = read.get(axis)
            smaller = [each for each in values if type(each) is type(given) is int and each <= given]
            found = [each for each in values if str(each) == str(given)] or sorted(smaller)[-1:]
            hides = found and f"{axis}={found[0]}".startswith(HIDING)
            if found and not hides and model.fits({**point, axis: found[0]}):
                point[axis] = found[0]
        if (whole := model.completed(point)) is not None:
            yield Configuration(scope.interface, whole, scope.ranges.seed)


def _around(scope: Scope, wrong: Configuration) -> list[Configuration]:
    """Return cases that keep the non-default values of a wrong case, and together have all values of the other axes."""
    model = _model(scope)
    if model.completed(wrong.non_default) is None:
        return []
    around = replace(model, axes={**model.axes, **{axis: (each,) for axis, each in wrong.non_default.items()}})
    points = around.covering(scope.ranges.seed, around.values())
    return _cheapest_first(_numbered(scope, points), scope.ranges, MOST_PRODUCTS)


def _varied(scope: Scope, subject: Configuration, wrong: Sequence[Configuration]) -> list[Configuration]:
    """Return up to `MOST_VARIED` variants of the wrong case `subject`, each with another value of one parameter, and variants
    with shorter requests. Skip values that a case in `wrong` already combines with all non-default values of `subject`. If such
    cases have several values of a parameter, try only its smallest and largest number, or its default if it has no numbers.
    """
    model, left = _model(scope), list[list[Configuration]]()
    # A call of one row is judged on a rank only here, where it may be the right variant.
    model = replace(model, rules=tuple(rule for rule in model.rules if rule.why != ONE_ROW_OF_RANK))
    like = [case.values for case in wrong if subject.non_default.items() <= case.non_default.items()]
    for axis, values in model.axes.items():
        met, sizes = {case[axis] for case in like}, sorted(each for each in values if type(each) is int)
        ends = dict.fromkeys((*sizes[:1], *sizes[-1:]) or values[:1])
        chosen = [each for each in (ends | dict.fromkeys(values) if len(met) == 1 else ends) if each not in met]
        telling = [each for each in chosen if not f"{axis}={each}".startswith(HIDING)]
        left.append(_changed(model, subject, ({axis: each} for each in telling)))
    in_turns = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*left)))
    longest = subject.get("lengths")
    lengths = [each for each in FIRST_DIVIDED if type(longest) is int and each < longest]
    shorter = _changed(model, subject, ({"lengths": each} for each in lengths))
    return _cheapest_first([*shorter, *itertools.islice(in_turns, MOST_VARIED)], scope.ranges, MOST_PRODUCTS)


def _resized(scope: Scope, subject: Configuration) -> list[Configuration]:
    """Return variants of a wrong case with two changed numbers. They show whether a relation of two numbers makes it wrong,
    such as a window shorter than a request's rows. The first number, which is no default, becomes the next smaller or the next
    larger value of its axis. Of the values of the second number, use the two for which the call computes least and most.
    """
    model, chosen = _model(scope), list[Configuration]()
    sizes = {axis: sorted(each for each in values if type(each) is int) for axis, values in model.axes.items()}
    for axis in (axis for axis in subject.non_default if subject[axis] in sizes[axis]):
        at = sizes[axis].index(subject[axis])
        next_sizes = (*sizes[axis][max(at - 1, 0) : at], *sizes[axis][at + 1 : at + 2])
        for size, other in itertools.product(next_sizes, sizes):
            with_sizes = [each for each in sizes[other] if other != axis and each != subject.get(other)]
            changed = _changed(model, subject, ({axis: size, other: each} for each in with_sizes))
            cases = _cheapest_first(changed, scope.ranges, MOST_PRODUCTS)
            chosen += dict.fromkeys((*cases[:1], *cases[-1:]))
    return chosen


def _changed(model: Model, subject: Configuration, changes: Iterable[Point]) -> list[Configuration]:
    """Return for each of `changes` (values of some axes) a variant of a case with these values, if the rules permit it."""
    points = (model.completed({**subject.non_default, **each}) for each in changes)
    return [Configuration(subject.interface, point, subject.seed) for point in points if point]


def _simplest(cases: Iterable[Configuration]) -> list[Configuration]:
    """Return up to `MOST_SUBJECTS` cases, simplest first. Skip a case whose non-default axes include all of a simpler one's."""
    chosen = list[Configuration]()
    for case in sorted(cases, key=lambda case: len(case.non_default)):
        if not any(each.non_default.keys() <= case.non_default.keys() for each in chosen):
            chosen.append(case)
    return chosen[:MOST_SUBJECTS]


def _simpler(subject: DrawnPoint, wrong: Collection[str]) -> Iterator[DrawnPoint]:
    """Yield variants of a wrong case, each with a simpler value of one parameter. For each parameter, keep the first value that
    is wrong too (the variant's repr is in `wrong`), and also yield the case with all values that are kept so far.
    """
    together = subject
    for axis in subject.point:
        for each in subject.smaller(axis):
            yield each
            more = replace(together, point={**together.point, axis: each.point[axis]})
            is_first = together.point[axis] == subject.point[axis]
            if is_first and each.case.without_seed in wrong and subject.model.fits(more.point):
                together = more
                yield together


def _draw_on(scope: Scope, verdicts: Sequence[CaseVerdict]) -> Iterator[DrawnPoint]:
    taken, _ = retried(_model(scope), verdicts)
    if taken is not None:
        seed = f"{scope.interface.name} {scope.ranges.seed}"
        yield from samples(taken, seed, partial(Configuration, scope.interface), fewest=2)


JUDGES: dict[Interface, Callable[[CaseRun], None]] = {
    **dict.fromkeys(AttentionCall, judge_call),
    MetadataFunction.DRAFT_KV_INDICES: judge_lists,
    **dict.fromkeys(METADATA, judge_metadata),
}


def _judge(run: CaseRun) -> None:
    JUDGES[run.case.interface](run)


IN_CIRCUMSTANCES = tuple(partial(_left_in_circumstances, chosen) for chosen in (None, 1))
PAIRS_AGAIN = tuple(partial(_again, chosen) for chosen in CHOSEN)
MORE: dict[Level, Sequence[Following]] = {
    Level.QUICK: (_usual_values, partial(_left_values, CHOSEN[-1]), partial(_left_values, 1)),
    Level.SMOKE: IN_CIRCUMSTANCES,
    Level.FULL: (*IN_CIRCUMSTANCES, _with_declined_values, *PAIRS_AGAIN, _alone),
}
CHECK = Check("K18", __doc__, _cases, _judge, tuple(MODELS), more=MORE, nearby=_nearby, draw_on=_draw_on)
