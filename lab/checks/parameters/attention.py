"""Make random attention cases with parameter values from `Ranges`, and find out which of these values a kernel accepts."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lab.calls.problem import AttentionCall
from lab.checks.parameters.covering import Constraint, Model, Point
from lab.checks.parameters.sampling import DrawnPoint, samples
from lab.checks.run.verdicts import CaseVerdict, Judged, Outcome
from lab.ranges import OPTIONS, SEEDS, Ranges, text_of
from lab.workloads.attention_case import AttentionCase, Storage
from lab.workloads.interfaces import PAGED_CALLS, Interface

NUM_BUILDS = 24  # a multiple of the numbers of groups (8), of numbers of rows (8), of dtypes (3) and of page sizes (4)
# Fields of `Ranges` from which a call gets one value each. Kernels are compiled for each value, except of AT_RUN_TIME.
AT_RUN_TIME = ("num_kv_heads", "kv_layouts")
MHA_FIELDS = ("dtypes", "groups", "head_dims", "page_sizes", "q_lens", "windows", "sinks", *AT_RUN_TIME)
MLA_FIELDS = ("dtypes", "mla_head_dims", "mla_heads", "mla_page_sizes", "q_lens")
CONTEXT_ROWS = (17, 65)  # numbers of query rows of some requests in a context call
MOST_DRAWN_ROWS = 80  # of one request in a random context call
MOST_DRAWN_REQUESTS = 4
DISCOVERY = "discovery"  # the key of the check that makes one call
MOST_TRIES = 400  # calls of `discover` until one is accepted
AT_ONCE = 16  # calls that are submitted together

Submit = Callable[[str, Any], Callable[[], Judged]]


def fields_of(interface: Interface) -> tuple[str, ...]:
    return MLA_FIELDS if interface is AttentionCall.MLA_DECODE else MHA_FIELDS


def balanced(
    ranges: Ranges, interface: Interface, count: int, seed: int = 0, num_builds: int = NUM_BUILDS
) -> Iterator[AttentionCase]:
    """Yield `count` random cases in which each value of a parameter occurs equally often. Many lengths end at the edge of a
    page or tile. Few kernels are compiled: for at most `num_builds` combinations of values such as dtype and page size.
    """
    seed += SEEDS * ranges.seed
    # All checks have the same combinations of compile-time values.
    rng, rng_of_builds = random.Random(f"{interface.name} {seed}"), random.Random(f"{interface.name} {ranges.seed}")
    compiled = [name for name in fields_of(interface) if name not in AT_RUN_TIME]
    all_builds, first = _dealt(rng_of_builds, ranges, compiled, num_builds), rng.randrange(num_builds)
    at_run_time = _dealt(rng, ranges, [name for name in fields_of(interface) if name in AT_RUN_TIME], count)
    for number in range(count):
        values = all_builds[(first + number) % num_builds] | at_run_time[number]
        q_lens, kv_lens = (lens[number % 3 :] + lens[: number % 3] for lens in _lens(rng, ranges, interface, values))
        page_size = _page_size(values)
        window = rng.choice((0, 1, page_size - 1, page_size, 100, 127)) if values.get("windows") else -1
        case = case_within(ranges, interface, values, kv_lens, q_lens, window_left=window, seed=number + seed)
        yield replace(case, storage=replace(case.storage, page_seed=case.seed))


def case_within(
    ranges: Ranges, interface: Interface, values: Point, kv_lens: Sequence[int], q_lens: Sequence[int], **fields: Any
) -> AttentionCase:
    """Return the attention case with these lengths and `values` (of fields of `Ranges`, by name). Required are "dtypes", the
    page size, and the numbers of heads and the head dimensions that `interface` has. The defaults are no sinks, and the layout
    HND. `ranges` determines only the dtype to which a kernel rounds its operands. `fields` are further fields of the case.
    """
    dtype, kv_dtype = values["dtypes"]
    if interface is AttentionCall.MLA_DECODE:
        head_dim, v_head_dim = values["mla_head_dims"]
        heads = {"num_kv_heads": 1, "group": values["mla_heads"], "head_dim": head_dim, "v_head_dim": v_head_dim}
    else:
        heads = {"num_kv_heads": values["num_kv_heads"], "group": values["groups"], "head_dim": values["head_dims"]}
    return AttentionCase(
        AttentionCall(interface),
        tuple(kv_lens),
        tuple(q_lens),
        **heads,
        dtype=dtype,
        kv_dtype=kv_dtype,
        arithmetic=ranges.arithmetic(dtype, kv_dtype),
        sinks=values.get("sinks", False),
        storage=Storage(_page_size(values), kv_layout=values.get("kv_layouts", "HND")),
        **fields,
    )


def _page_size(values: Mapping[str, Any]) -> int:
    return int(values.get("page_sizes") or values["mla_page_sizes"])


def values_of(case: AttentionCase) -> Point:
    found: Point = {
        "dtypes": (case.dtype, case.kv_dtype),
        "q_lens": case.q_lens[0],
        "mla_head_dims": (case.head_dim, case.v_head_dim),
        "head_dims": case.head_dim,
        **dict.fromkeys(("groups", "mla_heads"), case.group),
        "num_kv_heads": case.num_kv_heads,
        **dict.fromkeys(("page_sizes", "mla_page_sizes"), case.page_size),
        "kv_layouts": case.storage.kv_layout,
        "windows": case.window_left >= 0,
        "sinks": case.sinks,
    }
    return {name: found[name] for name in fields_of(case.interface)}


def _lens(
    rng: random.Random, ranges: Ranges, interface: Interface, values: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    q_len, page_size = values["q_lens"], _page_size(values)
    edges = edge_lengths(page_size, ranges.longest)
    if interface is AttentionCall.MLA_DECODE:
        return [q_len] * 3, [max(rng.choice(edges), q_len) for _ in range(3)]
    q_lens = [rng.choice((1, q_len, *CONTEXT_ROWS)) if interface is AttentionCall.CONTEXT else q_len for _ in range(4)]
    kv_lens = [max(rng.choice(edges), rows) for rows in q_lens[:-1]]
    # One request is long, so that a window truncates something.
    return q_lens, [*kv_lens, max(ranges.longest - rng.randrange(page_size), q_lens[-1])]


def drawn_cases(
    interface: Interface, ranges: Ranges, adapt: Callable[[AttentionCase], Any] = lambda case: case
) -> Iterator[DrawnPoint]:
    """Yield random attention cases without end, each changed by `adapt`; none if the function reads no paged cache."""

    def make(point: Point, seed: int) -> Any:
        # The seed determines the data, and the lengths of all requests except the longest.
        rng, q_len = random.Random(f"{interface.name} {seed}"), point["q_lens"]
        kv_lens = [rng.randint(q_len, point["longest"]) for _ in range(point["requests"] - 1)] + [point["longest"]]
        rng.shuffle(kv_lens)
        q_lens = [q_len] * len(kv_lens)
        if interface is AttentionCall.CONTEXT:
            q_lens = [rng.randint(1, min(kv_len, point["rows"])) for kv_len in kv_lens]
        window = point["window_left"] if point.get("windows") else -1
        return adapt(case_within(ranges, interface, point, kv_lens, q_lens, window_left=window, seed=seed))

    if interface not in PAGED_CALLS:
        return
    axes: dict[str, Sequence[Any]] = {
        "requests": range(1, MOST_DRAWN_REQUESTS + 1),
        "longest": range(min(ranges.q_lens), ranges.longest + 1),
        **{name: getattr(ranges, name) for name in fields_of(interface)},
    }
    if interface is AttentionCall.CONTEXT:
        axes["rows"] = range(1, MOST_DRAWN_ROWS + 1)
    if True in ranges.windows and "windows" in axes:
        axes["window_left"] = range(ranges.longest + 1)
    rules = (Constraint(lambda longest, q_lens: q_lens <= longest, "a request has its rows' keys"),)
    # The same points for all checks, so that few kernels are compiled for them.
    yield from samples(Model(axes, rules), f"{interface.name} {ranges.seed}", make)


def _dealt(rng: random.Random, ranges: Ranges, names: Sequence[str], count: int) -> list[Point]:
    points: list[Point] = [{} for _ in range(count)]
    for name in names:
        values = getattr(ranges, name)
        for number, point in enumerate(points):
            if number % len(values) == 0:
                rng.shuffle(order := [*values])
            point[name] = order[number % len(values)]
    return points


def edge_lengths(page_size: int, longest: int) -> list[int]:
    """Return lengths up to `longest` near which a loop over pages or tiles ends: 1, 2, a page, two pages, 64, 128, 256, 512 and
    `longest`, each also minus 1 and plus 1.
    """
    edges = {1, 2, page_size, 2 * page_size, 64, 128, 256, 512, longest}
    return sorted({near for edge in edges for near in (edge - 1, edge, edge + 1) if 0 < near <= longest})


def is_mostly_declined(verdicts: Sequence[CaseVerdict]) -> bool:
    return 2 * sum(verdict.outcome is Outcome.DECLINED for verdict in verdicts) > len(verdicts)


def discover(submit: Submit, interface: Interface, ranges: Ranges, taken: Sequence[Any] = ()) -> Ranges | None:
    """Return `ranges` without the values that a kernel's function refuses; None if it accepts no call, or refuses no value.

    For each value, make one call that differs only in this value from an accepted call: the call of a case in `taken` (cases
    that were accepted before), or a call with usual values. A value with which the call fails is kept, so that the failure is
    judged. `submit(check, case)` submits a case for judging, and returns a function that waits for the judgement.
    """
    ranges = replace(ranges, dtypes=ranges.widened("dtypes"))

    def outcomes_of(several: Sequence[Point]) -> list[Outcome]:
        waiting = []
        for values in several:
            q_len, window_left = values["q_lens"], 16 if values.get("windows") else -1
            kv_lens = (max(q_len, 40), max(q_len, 9))
            case = case_within(ranges, interface, values, kv_lens, (q_len, q_len), window_left=window_left)
            waiting.append(submit(DISCOVERY, case))
        return [wait().outcome for wait in waiting]

    base = _first_taken(outcomes_of, interface, ranges, taken)
    if base is None:
        return None
    tried = [(name, value) for name in base for value in getattr(ranges, name) if value != base[name]]
    outcomes = outcomes_of([{**base, name: value} for name, value in tried])
    declined = {each for each, outcome in zip(tried, outcomes, strict=True) if outcome is Outcome.DECLINED}
    left: Point = {name: tuple(each for each in getattr(ranges, name) if (name, each) not in declined) for name in base}
    return replace(ranges, **left) if declined else None


def _first_taken(
    outcomes_of: Callable[[Sequence[Point]], list[Outcome]], interface: Interface, ranges: Ranges, taken: Sequence[Any]
) -> Point | None:
    names = fields_of(interface)
    known = (values_of(case) for case in taken if isinstance(case, AttentionCase))
    within = (each for each in known if all(each[name] in getattr(ranges, name) for name in names))
    ordered = [enumerate(sorted(getattr(ranges, name), key=partial(_rank, name))) for name in names]
    # First the most usual value of every field, then combinations with more and more unusual values.
    places = sorted(itertools.product(*ordered), key=lambda each: sum(place for place, _ in each))
    likely = (dict(zip(names, (value for _, value in each), strict=True)) for each in places[:MOST_TRIES])
    tries = itertools.chain(itertools.islice(within, 1), likely)
    while several := list(itertools.islice(tries, AT_ONCE)):
        for values, outcome in zip(several, outcomes_of(several), strict=True):
            if outcome is Outcome.RIGHT:
                return values
    return None


def _rank(name: str, value: Any) -> int:  # of a value among the likely ones of a field; a high one if it is not likely
    return [*map(text_of, OPTIONS[name].likely), text_of(value)].index(text_of(value))
