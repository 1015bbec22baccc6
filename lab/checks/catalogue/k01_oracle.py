"""Any error of an output vector beyond what low-precision arithmetic makes of the same inputs, and a wrong LSE.

An absolute tolerance lets everything through once outputs are as small as 1/sqrt(length), and a share of wrong elements
may hold a whole head. Here each (row, head) is held by itself: relative L2 against float64 on the quantised inputs, with the
measured error of eager arithmetic times a small factor as the bound.
"""

from collections.abc import Iterator

from lab.checks.check import Check, Level, counted, first_line, same
from lab.checks.space import Space
from lab.checks.trial import Trial, truth_of_call
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import Interface


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[AttentionCase]:
    yield from space.covering(interface, counted(level, 8, 48), seed=1)


def _judge(trial: Trial) -> None:
    inputs = trial.build()
    truth = truth_of_call(inputs)
    trial.hold("the call", trial.call(inputs), truth)
    trial.hold("with the LSE", trial.attempt("return_lse", inputs, return_lse=True), truth)


CHECK = Check("K1", "oracle", first_line(__doc__), _cases, _judge, adapt=same)
