"""Show the result of `lab invariance`: for each factor, such as the batch size, whether the output bits depend on it."""

from collections.abc import Iterator, Sequence

from lab.checks.run.invariance import Answer, Dependence, Invariance
from lab.reports.judgement import SHOWN_CHARACTERS, SHOWN_DECLINES, reproduction
from lab.reports.tables import Cell, TableReport, grouped, table_of_lines, words
from lab.wording import joined, shortened
from lab.workloads.interfaces import INTERFACES

STYLES = {Answer.WRONG: "wrong", Answer.WITHIN: "unsure", Answer.SAME: "right"}  # by answer, if the calls were made


def invariance_report(found: Invariance) -> TableReport:
    """Return a table that says whether output bits depend on a factor, such as the batch size. It has one row per function and
    factor, and one column per pair of query dtype and K/V dtype.
    """
    rows = grouped(
        ((each.interface.name.lower().replace("ragged_context", "ragged"), each.check), each)
        for each in sorted(found.dependences, key=lambda each: INTERFACES.index(each.interface))
    )
    dtypes = tuple(dict.fromkeys(each.dtypes for each in found.dependences))
    lines = [[*map(words, names), *(_cell(row, each) for each in dtypes)] for names, row in rows.items()]
    report = found.report
    where = report.environment.get("gpu") or report.device
    title = f"{report.implementation} on {where}: what do output bits depend on?"
    findings = [each for names, row in rows.items() for each in _examples(" ".join(names), row)]
    refused = grouped(dict.fromkeys(_reasons(found.dependences)))
    findings += [(f"{joined([*factors])} {reason}", "") for reason, factors in refused.items()][:SHOWN_DECLINES]
    table = table_of_lines(("function", "factor", *dtypes), lines)
    return TableReport((), table, (*_summary(found),), found.as_record(), found.exit_status, title, (*findings,))


def _cell(row: Sequence[Dependence], dtypes: str) -> Cell:
    for each in row:
        if each.dtypes == dtypes:
            text = f"{each.most_ulps:.3g} ulp" if each.answer is Answer.WITHIN else each.answer.value
            count, tried = each.answers[each.answer], len(each.verdicts) - each.answers[Answer.UNSUPPORTED]
            cases = "" if each.answer not in STYLES else f" {count}" if count == tried else f" {count}/{tried}"
            return words(text + cases, STYLES.get(each.answer, "declined"))
    return words(None)


def _examples(names: str, row: Sequence[Dependence]) -> Iterator[tuple[str, str]]:
    for answer in (Answer.WRONG, Answer.WITHIN):
        cases = [smallest for each in row if (smallest := each.smallest(answer))]
        for verdict in sorted(cases, key=lambda verdict: sum(verdict.case.kv_lens))[:1]:
            most = max(verdict.judged.differences, key=lambda each: each.ulps, default=None)
            why = verdict.reason
            if answer is Answer.WITHIN and most is not None:
                why = f"output bits differ by up to {most.ulps:.3g} ulp with {most.what}"
            lens = (joined([*map(str, each)]) for each in (verdict.case.kv_lens, verdict.case.q_lens))
            again = f"    reproduce with requests of {' keys and '.join(lens)} rows: {reproduction(verdict)}"
            yield f"{names}, {answer.value}: {shortened(why, SHOWN_CHARACTERS)}", again


def _reasons(found: Sequence[Dependence]) -> Iterator[tuple[str, str]]:
    """Yield a pair for each case that the kernel refused: text such as "not tried: <reason>", and the varied factor's name."""
    for each in found:
        for verdict in each.verdicts:
            answer = Answer.of(verdict)
            if answer in {Answer.NOT_TRIED, each.answer} - {*STYLES} and verdict.judged.declines:
                yield f"{answer.value}: {shortened(verdict.judged.declines[0], SHOWN_CHARACTERS)}", each.check


def _summary(found: Invariance) -> Iterator[str]:
    if found.report.left_out or not found.dependences:
        yield str(found.report)
    for answer in Answer:
        if unmet := [each for each in found.unmet if each.required_answer is answer]:
            where = dict.fromkeys(f"{each.check} of {each.interface.name.lower()}" for each in unmet)
            yield f"required, but {answer.value}: {', '.join(where)}"
    if found.without_cases:
        yield f"required, but no function here has a case of it: {', '.join(found.without_cases)}"
    worst: dict[str, Answer] = {}  # of each factor, among all functions and dtypes
    for each in found.dependences:
        worst[each.check] = min(worst.get(each.check, each.answer), each.answer, key=[*Answer].index)
    of = {answer: [factor for factor, found in worst.items() if found is answer] for answer in Answer}
    texts = {answer: answer.value for answer in Answer} | {Answer.WITHIN: f"bits differ {Answer.WITHIN.value}"}
    yield "; ".join(f"{texts[answer]}: {', '.join(factors)}" for answer, factors in of.items() if factors)
