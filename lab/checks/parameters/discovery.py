"""What a function takes of the axes, found by single calls of tiny cases where it declines most."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.checks.case_run import CaseRun
from lab.checks.properties.check import Check
from lab.checks.run.verdicts import Judged, Outcome
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Storage
from lab.workloads.interfaces import Interface

if TYPE_CHECKING:
    from lab.checks.report import CaseVerdict

# Axes whose values can be tried, by what kernels take the most often; other values come after these.
_SHARED: dict[str, tuple[Any, ...]] = {"dtypes": (), "q_lens": (1,)}
_MHA = _SHARED | {
    "head_dims": (128, 64),
    "page_sizes": (64, 16, 32),
    "groups": (8, 4, 1),
    "kv_layouts": ("HND",),
    "num_kv_heads": (1, 2),
    "windows": (False,),
    "sinks": (False,),
}
_MLA = _SHARED | {"mla_head_dims": ((576, 512),), "mla_heads": (128, 16), "mla_page_sizes": (64, 32)}
MOST_TRIES = 400  # calls in search of one that is taken
AT_ONCE = 16  # of them

Values = dict[str, Any]
Submit = Callable[[str, Any], Callable[[], Judged]]


def _judge(run: CaseRun) -> None:
    """Count a call that returns as judged: it is taken, right or not."""
    run.call(run.build())
    run.judged += 1


PROBE = Check("probe", "probe", "", lambda *_: (), _judge)


def is_mostly_declined(verdicts: Sequence["CaseVerdict"]) -> bool:
    """Tell whether more than half of a function's cases were declined."""
    return 2 * sum(verdict.outcome is Outcome.DECLINED for verdict in verdicts) > len(verdicts)


def discover(submit: Submit, interface: Interface, ranges: Ranges, taken: Sequence[Any] = ()) -> Ranges | None:
    """Return the axes that a function takes: the values that it takes in place of those of one case that it takes.

    Args:
        submit: has one case of a check judged, as `lab.checks.run.workers.Workers.submit`.
        interface: the function.
        ranges: the axes to narrow.
        taken: cases that the function is known to take.

    Returns:
        None if no case is taken, or all values of all axes are.
    """
    usual = _MLA if interface is Interface.MLA_DECODE else _MHA
    base = _first_taken(
        submit, interface, ranges, [_values_of(case) for case in taken if isinstance(case, AttentionCase)]
    )
    if base is None:
        return None
    tried = [(axis, value) for axis in usual for value in getattr(ranges, axis) if value != base[axis]]
    outcomes = _outcomes(submit, [_case(interface, ranges, {**base, axis: value}) for axis, value in tried])
    # What fails is not refused: it is judged, so that it shows.
    takes = {pair for pair, outcome in zip(tried, outcomes, strict=True) if outcome is not Outcome.DECLINED}
    narrowed: Values = {
        axis: tuple(value for value in getattr(ranges, axis) if value == base[axis] or (axis, value) in takes)
        for axis in usual
    }
    found = replace(ranges, **narrowed)
    return None if found == ranges else found


def _first_taken(submit: Submit, interface: Interface, ranges: Ranges, known: Sequence[Values]) -> Values | None:
    usual = _MLA if interface is Interface.MLA_DECODE else _MHA
    given = [{axis: values[axis] for axis in usual} for values in known if _is_inside(values, usual, ranges)]
    ordered = [sorted(getattr(ranges, axis), key=partial(_place, firsts)) for axis, firsts in usual.items()]
    # The likely values of all axes first, then those with one less likely, two, and so on.
    places = sorted(itertools.product(*(range(len(values)) for values in ordered)), key=sum)
    likely = (
        {axis: values[place] for axis, values, place in zip(usual, ordered, each, strict=True)}
        for each in places[:MOST_TRIES]
    )
    tries: Iterator[Values] = itertools.chain(given[:1], likely)
    while several := list(itertools.islice(tries, AT_ONCE)):
        outcomes = _outcomes(submit, [_case(interface, ranges, values) for values in several])
        for values, outcome in zip(several, outcomes, strict=True):
            if outcome is Outcome.RIGHT:
                return values
    return None


def _place(firsts: tuple[Any, ...], value: Any) -> int:
    return firsts.index(value) if value in firsts else len(firsts)


def _is_inside(values: Values, usual: dict[str, tuple[Any, ...]], ranges: Ranges) -> bool:
    return all(values.get(axis) in getattr(ranges, axis) for axis in usual)


def _outcomes(submit: Submit, cases: Sequence[AttentionCase]) -> list[Outcome]:
    waiting = [submit(PROBE.key, case) for case in cases]
    return [wait().outcome for wait in waiting]


def _case(interface: Interface, ranges: Ranges, values: Values) -> AttentionCase:
    """Return two short requests of these values."""
    dtype, kv_dtype = values["dtypes"]
    q_len = values["q_lens"]
    tensors: Values = {"dtype": dtype, "kv_dtype": kv_dtype, "arithmetic": ranges.arithmetic(kv_dtype)}
    kv_lens, q_lens = (max(q_len, 40), max(q_len, 9)), (q_len, q_len)
    if interface is Interface.MLA_DECODE:
        head_dim, v_head_dim = values["mla_head_dims"]
        heads: Values = {
            "num_kv_heads": 1,
            "group": values["mla_heads"],
            "head_dim": head_dim,
            "v_head_dim": v_head_dim,
        }
        return AttentionCase(interface, kv_lens, q_lens, **heads, **tensors, storage=Storage(values["mla_page_sizes"]))
    return AttentionCase(
        interface,
        kv_lens,
        q_lens,
        num_kv_heads=values["num_kv_heads"],
        group=values["groups"],
        head_dim=values["head_dims"],
        **tensors,
        window_left=16 if values["windows"] else -1,
        sinks=values["sinks"],
        storage=Storage(values["page_sizes"], values["kv_layouts"]),
    )


def _values_of(case: AttentionCase) -> Values:
    """Return a case's place on the axes."""
    return {
        "dtypes": (case.dtype, case.kv_dtype),
        "q_lens": case.q_lens[0],
        "groups": case.group,
        "num_kv_heads": case.num_kv_heads,
        "head_dims": case.head_dim,
        "page_sizes": case.page_size,
        "windows": case.window_left >= 0,
        "sinks": case.sinks,
        "kv_layouts": case.storage.kv_layout,
        "mla_head_dims": (case.head_dim, case.v_head_dim),
        "mla_heads": case.group,
        "mla_page_sizes": case.page_size,
    }
