"""Find a verification of n draft tokens that differs from n decodes: a wrong mask, or too many or too few draft tokens.

Among thousands of random keys the few draft tokens weigh almost nothing, so that outputs with a causal mask and with a full
mask agree within fp8 tolerance. Here each query row is computed again by a call with this row alone and the keys up to it.
Needles (a few keys that outweigh all others) lie at the first and last keys that the row sees.
"""

from collections.abc import Iterator
from dataclasses import replace

from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.properties.check import WITHOUT_RANKS, Check, Scope
from lab.checks.properties.variants import Variant, part
from lab.references.errors import relative_l2
from lab.workloads.attention_case import AttentionCase, Contents
from lab.workloads.inputs.call import CallInputs


def _cases(scope: Scope) -> Iterator[AttentionCase]:
    for case in scope.balanced(4, 24, seed=10):
        yield several_rows(replace(case, contents=Contents.NEEDLES))
        yield several_rows(case)


def several_rows(case: AttentionCase) -> AttentionCase:
    """Return the case with 2 or more query rows per request (2 to 8 in a context call), and at least as many keys."""
    most = 8 if case.interface is AttentionCall.CONTEXT else max(2, *case.q_lens)
    return case.with_rows(*(min(max(q_len, 2), most) for q_len in case.q_lens))


def _judge(run: CaseRun) -> None:
    inputs, truth, together = run.base_call("together")
    allowed = 2.0 * truth.compare(together.out).bound  # both compared results may have an error up to the bound
    for variant in single_rows(inputs):
        result = run.vary("one row at a time", variant.inputs)
        run.expect_close(variant.what, result, variant.inputs.truth())
        expected = together.out[variant.rows]
        if result is not None and result.out.shape == expected.shape:
            apart = relative_l2(result.out, expected)
            if bool((~(apart <= allowed[variant.rows])).any()):
                run.wrongs.append(f"“{variant.what}” and “together” differ by {float(apart.max()):.3g}")


def single_rows(inputs: CallInputs) -> Iterator[Variant]:
    """Yield calls with one query row of each request and the keys up to it: the last row, then the row before it, and so on."""
    for back in range(min(inputs.q_lens)):
        rows = [range(q_len - 1 - back, q_len - back) for q_len in inputs.q_lens]
        which = f"row {back} before the last" if back else "the last row"
        yield part(inputs, f"{which} of each request alone", range(len(rows)), rows)


def halves(inputs: CallInputs) -> Iterator[Variant]:
    firsts = [range(q_len // 2) for q_len in inputs.q_lens]
    rests = [range(q_len // 2, q_len) for q_len in inputs.q_lens]
    for what, rows in (("the first half of the rows", firsts), ("the second half of the rows", rests)):
        yield part(inputs, what, range(len(rows)), rows)


CHECK = Check("K8", __doc__, _cases, _judge, drawn=several_rows, kinds=WITHOUT_RANKS)
