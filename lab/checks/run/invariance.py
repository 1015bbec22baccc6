"""Find out whether the bits of a kernel's outputs depend on factors, such as the batch size. For each factor, the judge
compares the outputs of calls that differ only in this factor.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.checks.properties.invariance import FACTORS
from lab.checks.report import CheckSummary, Report
from lab.checks.run.judge import judge
from lab.checks.run.verdicts import BROKEN, CaseVerdict, Outcome
from lab.exit_status import ExitStatus
from lab.named_enum import NamedEnum
from lab.ranges import text_of


class Answer(NamedEnum):
    """Whether the bits of an output depend on a factor, such as the batch size. The worst answer is first."""

    WRONG = "wrong"  # a result exceeds its bound, or a call failed
    WITHIN = "within the bound"  # the bits differ, and every result is within its bound
    SAME = "same bits"
    NOT_TRIED = "not tried"  # the lab or this machine cannot make the calls
    UNSUPPORTED = "unsupported"  # the kernel refuses the calls

    @classmethod
    def of(cls, verdict: CaseVerdict) -> "Answer":
        if verdict.outcome in BROKEN:
            return cls.WRONG
        if verdict.outcome is Outcome.DECLINED:
            return cls.NOT_TRIED if verdict.judged.by_lab else cls.UNSUPPORTED
        return cls.WITHIN if verdict.judged.differences else cls.SAME


@dataclass(frozen=True)
class Dependence(CheckSummary):
    """Whether the bits of one function's outputs, for one pair of query and key dtypes, depend on one factor."""

    dtypes: str  # dtypes of query and keys, such as "bf16/e4m3"

    @functools.cached_property
    def answers(self) -> Counter[Answer]:
        return Counter(map(Answer.of, self.verdicts))

    @property
    def answer(self) -> Answer:
        return next(answer for answer in Answer if self.answers[answer])

    @property
    def required_answer(self) -> Answer:
        not_tried = self.answer is Answer.SAME and self.answers[Answer.NOT_TRIED]
        return Answer.NOT_TRIED if not_tried else self.answer

    @property
    def most_ulps(self) -> float:
        return max((each.ulps for verdict in self.verdicts for each in verdict.judged.differences), default=0.0)

    def smallest(self, answer: Answer) -> CaseVerdict | None:
        """Return the verdict with this answer whose case has the fewest keys; None if there is none."""
        found = (verdict for verdict in self.verdicts if Answer.of(verdict) is answer)
        return min(found, key=lambda verdict: (sum(verdict.case.kv_lens), verdict.case.head_dim), default=None)

    def as_record(self) -> dict[str, Any]:
        return {
            "function": self.interface.value,
            "dtypes": self.dtypes,
            "factor": self.check,
            "answer": self.answer.value,
            "cases": {answer.value: count for answer, count in self.answers.items()},
            "most_ulps": str(self.most_ulps),  # JSON has no infinity
            "smallest": {each.value: found.number for each in Answer if (found := self.smallest(each))},
        }


@dataclass(frozen=True)
class Invariance:
    """The result of `lab invariance`: the judge's report, and the factors (such as the batch size) that must change no bit."""

    report: Report
    required: tuple[str, ...] = ()  # keys of factors

    @functools.cached_property
    def dependences(self) -> tuple[Dependence, ...]:
        found: dict[tuple[Any, ...], list[CaseVerdict]] = {}
        for verdict in self.report.verdicts:
            dtypes = text_of((verdict.case.dtype, getattr(verdict.case, "kv_dtype", verdict.case.dtype)))
            found.setdefault((verdict.check, verdict.interface, dtypes), []).append(verdict)
        return tuple(Dependence(check, of, tuple(cases), dtypes) for (check, of, dtypes), cases in found.items())

    @property
    def unmet(self) -> tuple[Dependence, ...]:
        """Return the results for required factors that did not meet the requirement: a bit changed, or a call was not made.
        Leave out functions and dtypes without a judged call.
        """
        judged = (Answer.WRONG, Answer.WITHIN, Answer.SAME)
        taken = {(each.interface, each.dtypes) for each in self.dependences if each.answer in judged}
        asked = (each for each in self.dependences if each.check in self.required)
        return tuple(
            each for each in asked if each.required_answer is not Answer.SAME and (each.interface, each.dtypes) in taken
        )

    @property
    def without_cases(self) -> tuple[str, ...]:
        return tuple(name for name in self.required if name not in {each.check for each in self.dependences})

    @property
    def exit_status(self) -> ExitStatus:
        status = self.report.exit_status
        is_over = status in (ExitStatus.REFUSED, ExitStatus.INTERRUPTED)
        is_unmet = self.unmet or (status is ExitStatus.DONE and self.without_cases)
        return ExitStatus.WRONG if is_unmet and not is_over else status

    def as_record(self) -> dict[str, Any]:
        answers = [each.as_record() for each in self.dependences]
        return self.report.as_record() | {"required": list(self.required), "invariance": answers}


def invariance(
    implementation: Any, *, factors: Sequence[str] = (), require: Sequence[str] = (), **settings: Any
) -> Invariance:
    """Find out on which factors, such as the batch size or the workspace, the bits of an implementation's outputs depend.

    Args:
        implementation: a module or object with attention functions, or its name.
        factors: keys of the factors to try, from `FACTORS`; all if empty.
        require: keys of the factors that must not change a bit. They are tried too.
        settings: other settings of `judge`, such as `level`, `ranges` and `functions`.

    Raises ValueError if there is no such factor, and the errors of `judge`.
    """
    known = {factor.key: factor for factor in FACTORS}
    if unknown := [name for name in (*factors, *require) if name not in known]:
        raise ValueError(f"there is no factor {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [factor for key, factor in known.items() if not factors or key in (*factors, *require)]
    report = judge(implementation, only=chosen, drawn=0, fresh=True, known_failures={}, **settings)
    return Invariance(report, tuple(require))
