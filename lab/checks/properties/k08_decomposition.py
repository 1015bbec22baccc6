"""A verify of n tokens that differs from n decodes: a wrong mask, or rows that see too many or too few draft tokens.

Among thousands of random keys the few draft tokens weigh almost nothing, so the results with a causal mask and with a full mask
agree within fp8 tolerance. Here each row is computed again as a call of one row with its shorter length, over needles (a few
keys that outweigh all others) at the first and last keys that the row sees.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.properties.check import Check, Scope
from lab.references.errors import relative_l2
from lab.workloads.attention_case import AttentionCase, Contents
from lab.workloads.inputs.attention import AttentionInputs


def _cases(scope: Scope) -> Iterator[AttentionCase]:
    for case in scope.balanced(4, 24, seed=10):
        yield _several_rows(replace(case, contents=Contents.NEEDLES))
        yield _several_rows(case)


def _several_rows(case: AttentionCase) -> AttentionCase:
    """Return the case with at least two query rows per request, at most eight in a context call, and with at least as many keys
    as rows in each request.
    """
    most = 8 if case.interface is AttentionCall.CONTEXT else max(2, *case.q_lens)
    return case.with_rows(*(min(max(q_len, 2), most) for q_len in case.q_lens))


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    truth = inputs.truth()
    together = run.call(inputs)
    run.expect_close("together", together, truth)
    q_lens = run.case.q_lens
    allowed = 2.0 * truth.compare(together.out).bound  # each side may be off by as much
    for back in range(min(q_lens)):
        rows = torch.tensor([sum(q_lens[: request + 1]) - 1 - back for request in range(len(q_lens))])
        rows = rows.to(run.device)
        single = one_row(inputs, rows, back)
        result = run.vary("one row at a time", single)
        what = f"the row {back} before the last, by itself"
        run.expect_close(what, result, single.truth())
        expected = together.out[rows]
        if result is not None and result.out.shape == expected.shape:
            apart = relative_l2(result.out, expected)
            if bool((~(apart <= allowed[rows])).any()):
                run.wrongs.append(f"“{what}” and “together” differ by {float(apart.max()):.3g}")


def one_row(inputs: AttentionInputs, rows: torch.Tensor, back: int) -> AttentionInputs:
    """Return the inputs of a call that has one query row of each request, and the request's keys up to this row's key.

    Args:
        inputs: the inputs of a call with several rows per request.
        rows: index of each request's row in the query.
        back: how many tokens that row is before the request's last row.
    """
    kv_lens = tuple(kv_len - back for kv_len in inputs.case.kv_lens)
    return replace(
        inputs,
        case=replace(inputs.case, kv_lens=kv_lens, q_lens=(1,) * len(kv_lens)),
        query=inputs.query[rows].contiguous(),
        histories=tuple(
            (keys[:kv_len], values[:kv_len]) for (keys, values), kv_len in zip(inputs.histories, kv_lens, strict=True)
        ),
        seq_lens=inputs.seq_lens - back,
    )


CHECK = Check("K8", "decomposition", __doc__, _cases, _judge, drawn=_several_rows)
