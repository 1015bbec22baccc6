"""Write the answer of a report: whether the implementation is right, for which engines, and what was not judged. A documented
corner is a case that a function's documentation allows and that no engine sends.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from lab.checks.parameters.coverage import Coverage, Reach
from lab.checks.parameters.profiles import profiles
from lab.checks.run.verdicts import BROKEN, CaseVerdict, Outcome
from lab.recorded.case import RecordedCase
from lab.wording import counted, joined, shortened
from lab.workloads.interfaces import Interface

SHOWN_CHARACTERS = 400  # of a sentence that says why the lab cannot judge a case, and what to install


class NotJudged(NamedTuple):
    """A clause of a report that says which cases or parameter values a run did not judge, and why."""

    full: str  # such as "the kernel refused 3 cases"
    brief: str | None = None  # the clause in a report's first line; None: `full`, "": no clause


def answer(
    verdicts: Sequence[CaseVerdict], profile: str, not_judged: Sequence[NotJudged], is_whole: bool, left_out: int = 0
) -> str:
    """Return the first line of a report, such as "Right for all that SGLang 0.5.23 sends." It agrees with the exit status.

    If `profile` names an engine, only the cases that this engine sends decide. `is_whole` is True if the run judged each
    function and all cases (at the quick level, most cases suffice). `left_out` is the number of planned cases not judged.
    """
    if deceived := [each for each in verdicts if each.outcome is Outcome.DISHONEST]:
        return f"Dishonest, and not judged: {deceived[0].judged.wrongs[0]}."
    judged = [each for each in verdicts if each.outcome is not Outcome.DECLINED]
    missing = "; ".join(filter(None, (full if brief is None else brief for full, brief in not_judged)))
    if not judged:
        if verdicts and missing:
            return f"Not judged: {missing}."
        if not missing:
            return "Not judged: the options leave no case of the kernel's functions."
        return f"Not judged: no case began: {missing}; to start the workers takes some of it."
    if not any(verdict.judged.judged or verdict.outcome in BROKEN for verdict in judged):
        missing = "; ".join(filter(None, (f"known failures in {counted(len(judged), 'case')}", missing)))
        return f"Not judged: no result was compared; {missing}."
    is_recorded = any(isinstance(verdict.case, RecordedCase) for verdict in judged)  # an engine sent each of them
    says = _of_recorded(judged) if is_recorded else _of_cases(verdicts, judged, profile, is_whole and not left_out)
    if not missing:
        return says
    if is_whole or _broken(deciding(judged, profile)):
        return f"{says} Not judged: {missing}."
    return f"Not judged as a whole: {missing}. {says}"


def deciding(verdicts: Iterable[CaseVerdict], profile: str) -> list[CaseVerdict]:
    """Return the verdicts that decide whether a run is right: all, or those on the cases that the engine `profile` sends."""
    return [verdict for verdict in verdicts if not profile or profile in verdict.sent_by]


def judged_functions(verdicts: Iterable[CaseVerdict], profile: str) -> set[Interface]:
    return {verdict.interface for verdict in deciding(verdicts, profile) if verdict.judged.judged}


def reach(verdicts: Sequence[CaseVerdict], not_judged: Sequence[NotJudged]) -> str:
    """Return a report's line about what was judged: "compared: 194 results of 42 cases; the kernel refused 15 cases"."""
    judged = [each for each in verdicts if each.outcome is not Outcome.DECLINED]
    counts = f"{counted(sum(verdict.judged.judged for verdict in judged), 'result')} of {counted(len(judged), 'case')}"
    return f"compared: {counts}{''.join(f'; {each.full}' for each in not_judged)}"


def state_between_calls(judged: Sequence[CaseVerdict]) -> str:
    """Return a sentence if wrong cases are right in their own process (`CaseVerdict.judged.alone`), else ""."""
    alone = Counter(each.judged.alone for each in judged if each.judged.alone)
    if not (right := alone["right"]):
        return ""
    cases, their = counted(alone.total(), "wrong case"), "its" if alone.total() == 1 else "their"
    reason = "the implementation keeps state between calls, or its results change from run to run"
    return f"Of {cases} repeated in {their} own process, {right} {'is' if right == 1 else 'are'} right: {reason}."


def _of_recorded(judged: Sequence[CaseVerdict]) -> str:
    broken, suspicious = _broken(judged), sum(bool(verdict.judged.suspicions) for verdict in judged)
    if broken:
        return f"{_word(judged)}: {broken:,} of {counted(len(judged), 'case')}."
    but = f", but the inputs of {counted(suspicious, 'case')} are suspicious, as the notes say" if suspicious else ""
    return f"Right{but}: {counted(len(judged), 'case')}."


def _of_cases(verdicts: Sequence[CaseVerdict], judged: Sequence[CaseVerdict], profile: str, is_whole: bool) -> str:
    engines = (profile,) if profile else tuple(profiles())
    known = sum(verdict.outcome is Outcome.KNOWN for verdict in judged)
    right, wrong = "right", _word(judged).lower()
    right += f", except for known failures in {counted(known, 'case')}," if known else ""
    wrongs, wholes, rights = list[str](), list[str](), list[str]()
    for names, sent in _by_sender(verdicts, engines, is_whole):
        its_judged = [verdict for verdict in sent if verdict.outcome is not Outcome.DECLINED]
        send = f"that {joined(names)} {'sends' if len(names) == 1 else 'send'}"
        if broken := _broken(its_judged):
            wrongs.append(f"{broken:,} of {counted(len(its_judged), 'case')} {send}")
        elif is_whole and its_judged == sent:
            wholes.append(f"for all {send}")
        elif its_judged:
            rights.append(f"{len(its_judged):,} of {counted(len(sent), 'case')} {send}")
    is_first_wrong = bool(wrongs)
    if corners := [verdict for verdict in judged if not set(engines) & set(verdict.sent_by)]:
        broken, words = _broken(corners), counted(len(corners), "documented corner")
        (wrongs if broken else rights).append(f"{broken:,} of {words}" if broken else words)
    wholes += [f"in {joined(rights)}"] if rights else []
    clauses = [f"{right} {', and '.join(wholes)}" if wholes else "", f"{wrong} in {joined(wrongs)}" if wrongs else ""]
    checks = {verdict.check for verdict in verdicts}
    vain = len(checks - {verdict.check for verdict in verdicts if verdict.judged.judged})
    narrow = f"{vain} of {counted(len(checks), 'check')} compared nothing" if vain else ""
    found = "; ".join(filter(None, (*(reversed(clauses) if is_first_wrong else clauses), narrow)))
    return f"{found[0].upper()}{found[1:]}."


def _by_sender(
    verdicts: Sequence[CaseVerdict], engines: Collection[str], is_whole: bool
) -> Iterable[tuple[list[str], list[CaseVerdict]]]:
    """Return tuples (names of engines, verdicts on the cases that they send). Engines share a tuple if they send the same
    cases, or if the run left no case out and all cases of these engines are right.
    """
    found: dict[tuple[int, ...], tuple[list[str], list[CaseVerdict]]] = {}
    for key in engines:
        if sent := [verdict for verdict in verdicts if key in verdict.sent_by]:
            is_right = is_whole and not any(verdict.outcome in (*BROKEN, Outcome.DECLINED) for verdict in sent)
            found.setdefault(() if is_right else tuple(map(id, sent)), ([], sent))[0].append(str(profiles()[key]))
    return found.values()


def _word(judged: Sequence[CaseVerdict]) -> str:
    outcomes = {verdict.outcome for verdict in judged}
    return "Wrong" if Outcome.WRONG in outcomes else "Failed" if Outcome.FAILED in outcomes else "Right"


def _broken(verdicts: Sequence[CaseVerdict]) -> int:
    return sum(verdict.outcome in BROKEN for verdict in verdicts)


def not_judged(
    verdicts: Sequence[CaseVerdict], coverages: Sequence[Coverage], left_out: str, chosen_by: str, profile: str = ""
) -> Iterator[NotJudged]:
    """Yield a clause for each reason why cases or parameter values were not judged. `left_out` is a clause about cases that the
    run left out, or "". `chosen_by` names the run's level, such as "the quick level".
    """
    if left_out:
        yield NotJudged(left_out)
    several = dict.fromkeys(verdict.interface for verdict in verdicts) if judged_functions(verdicts, "") else ()
    judged = judged_functions(verdicts, profile)
    if unjudged := [each.value for each in several if each not in judged]:
        sent = f" that {profiles()[profile]} sends" if profile else ""
        yield NotJudged(
            f"nothing of {joined(unjudged)}{sent}",
            None if len(unjudged) == 1 else f"nothing of {len(unjudged)} functions{sent}",
        )
    declined = [verdict for verdict in verdicts if verdict.outcome is Outcome.DECLINED]
    values = Counter(reach for each in coverages for reaches in each.values.values() for reach in reaches.values())
    if refused := [verdict for verdict in declined if not verdict.judged.by_lab]:
        also = (
            f", and with them {values[Reach.DECLINED]:,} of {_possible(values):,} values"
            if values[Reach.DECLINED]
            else ""
        )
        brief = f"the kernel refused {counted(len(refused), 'case')}"
        yield NotJudged(brief + also, brief)
    by_lab = Counter(verdict.reason for verdict in declined if verdict.judged.by_lab)
    for place, (reason, count) in enumerate(by_lab.items()):
        full = f"the lab cannot judge {counted(count, 'case')} here ({shortened(reason, SHOWN_CHARACTERS)})"
        yield NotJudged(full, "" if place else f"the lab cannot judge {counted(by_lab.total(), 'case')} here")
    failed = any(verdict.outcome is Outcome.FAILED for verdict in verdicts)
    causes = ["the end of the run"] * bool(left_out) + ["a failed call"] * failed + [chosen_by]
    pairs = sum((Counter(each.pairs) for each in coverages), Counter[Reach]())
    left = [
        f"{counts[Reach.LEFT_OUT]:,} of {_possible(counts):,} {what}"
        for what, counts in (("values", values), ("pairs of values", pairs))
        if counts[Reach.LEFT_OUT]
    ]
    if left:
        yield NotJudged(f"{' or '.join(causes)} leaves out {joined(left)}", "")


def _possible(counts: Counter[Reach]) -> int:
    return counts.total() - counts[Reach.IMPOSSIBLE]
