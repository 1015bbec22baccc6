"""A call that is right by itself and wrong in a serving engine's pass: any forward mode, from logical histories to outputs.

The arguments are an engine's: its pool, its metadata, its padding and its offsets, over both of a model's functions.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

from lab.checks.check import Check, Level, first_line
from lab.checks.forward import judge_forward
from lab.checks.space import Space
from lab.checks.survey import mode_cases
from lab.checks.trial import Declined, Trial
from lab.checks.verdicts import Outcome
from lab.workloads.forward_case import ForwardCase, Inputs
from lab.workloads.interfaces import Interface

WITH_BOTH = (Interface.DECODE, Interface.CONTEXT)


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[ForwardCase]:
    page_size = 64 if 64 in space.page_sizes else space.page_sizes[0]
    q_lens = (4,) if level is Level.SMOKE else tuple(space.q_lens)
    for case in mode_cases("tiny", page_size, q_lens, long=(3 * page_size + 5, 300)):
        if _runs_on(case, interface):
            yield replace(case, inputs=Inputs.NEEDLES)
            yield replace(case, sliding_window=True)


def _runs_on(case: ForwardCase, interface: Interface) -> bool:
    """Modes of decode calls belong to that function, the others to the context function."""
    mode = case.mode
    decodes = mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()
    return decodes == (interface is Interface.DECODE)


def _judge(trial: Trial) -> None:
    if not all(hasattr(trial.implementation, interface.value) for interface in WITH_BOTH):
        raise Declined("a pass may need both functions, and it has one")
    functions = SimpleNamespace(**{interface.value: trial.function(interface) for interface in WITH_BOTH})
    verdict = judge_forward(functions, trial.case, trial.device)
    if verdict.outcome is Outcome.DECLINED:
        raise Declined(verdict.reason)
    trial.judged += 1
    trial.worst_ratio = verdict.worst_ratio
    if verdict.outcome is not Outcome.RIGHT:
        trial.wrong("; ".join(filter(None, (verdict.reason, *map(str, verdict.findings)))))


CHECK = Check("M1", "forward_modes", first_line(__doc__), _cases, _judge, interfaces=WITH_BOTH)
