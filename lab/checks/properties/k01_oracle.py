"""Find any error of an output vector beyond what low-precision arithmetic makes of the same inputs, and a wrong LSE.

An absolute tolerance accepts any output of a long request, because outputs are as small as 1/sqrt(kv_len). A test that
tolerates some wrong elements accepts a head of wrong elements. Here the relative L2 error of each (row, head) vector against
float64 must be at most a small factor times the error of eager low-precision arithmetic. In some cases nearly all softmax
weight is on a key whose value is zero, so that errors in the small weights of all other keys show.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.properties.check import NVFP4_CACHE, Check, Scope, itself
from lab.checks.run.verdicts import BROKEN, CaseVerdict
from lab.references.softmax_attention import E4M3_MAX
from lab.workloads.attention_case import AttentionCase, Contents, Storage

PLAINER = ("contents", "sinks", "window_left", "offsets", "head_pages", "rank", "num_kv_heads", "group", "head_dim")


def _cases(scope: Scope) -> Iterator[AttentionCase]:
    yield from scope.balanced(8, 48, seed=1)
    for case in scope.balanced(3, 9, seed=22):
        yield replace(case, contents=Contents.LOUD)
        yield replace(case, contents=Contents.FAINT)
    faint = [replace(case, contents=Contents.FAINT) for case in scope.balanced(1, 1, seed=26)]
    yield from NVFP4_CACHE.cases(faint, scope.ranges, 1)
    batch_sizes = scope.ranges.large_batches
    for size, case in zip(batch_sizes, scope.balanced(len(batch_sizes), len(batch_sizes), seed=23), strict=True):
        yield _large_batch(scope.on_fewest_heads(case), size)
    for case in scope.balanced(4, 8, seed=25):
        if (case.arithmetic or case.dtype) is torch.bfloat16:  # fp16 and e4m3 weights of the light keys underflow
            yield replace(case, window_left=-1, contents=Contents.OVERSHADOWED)


def _large_batch(case: AttentionCase, batch_size: int) -> AttentionCase:
    q_lens = (case.q_lens[0],) * batch_size
    if case.interface is AttentionCall.CONTEXT:
        q_lens = tuple(1 + request % 3 for request in range(batch_size))
    lens = tuple(max(8, q_len) + 3 * request % 47 for request, q_len in enumerate(q_lens))
    return replace(case, kv_lens=lens, q_lens=q_lens)


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    out_dtype, truth = inputs.out_dtype, inputs.truth()
    result = run.expect_call("the call", inputs, truth)
    if result is not None and result.out.dtype != out_dtype:
        run.wrong(f"the output is {result.out.dtype}, and the call's is {out_dtype}")
    run.expect_close("with the LSE", run.vary("return_lse", inputs, return_lse=True), truth)
    if run.case.contents is not Contents.LOUD or run.case.is_mla:
        return
    largest = float(truth.expected.abs().max())
    if largest > 2 * E4M3_MAX * inputs.bmm2_scale:
        # P·V exceeds the range of e4m3, and the scaled output does not: a kernel that saturates before it scales is wrong.
        changes = {"out_dtype": E4M3, "bmm2_scale": inputs.bmm2_scale * E4M3_MAX / 2 / largest}
        run.vary("a small e4m3 output of loud values", inputs, inputs.truth(**changes), **changes)


def _plainer(scope: Scope, verdicts: Sequence[CaseVerdict]) -> Iterator[AttentionCase]:
    """Yield variants of the simplest wrong case (if possible of this check), each without one unusual property or with fewer
    requests, to show what makes it wrong. Yield none if check K18 (combinations) has no case, or a wrong one, which it varies.
    """
    of_k18 = [verdict.outcome for verdict in verdicts if verdict.check == "K18"]
    wrong = [verdict for verdict in verdicts if verdict.is_wrong_alone]
    plain = [each for each in wrong if each.judged.results and each.judged.results[0].wrong]  # the first call is wrong
    cases = [verdict.case for verdict in plain if isinstance(verdict.case, AttentionCase)]
    if not cases or not of_k18 or {*of_k18} & {*BROKEN}:
        return
    own = [verdict.case for verdict in plain if verdict.check == CHECK.key]
    case: AttentionCase = min(own or cases, key=lambda case: len(repr(case)))  # a repr leaves out defaults
    usual, size = torch.bfloat16, max(len(case.kv_lens) // 4, 1)
    changes: list[dict[str, Any]] = [
        {"storage": Storage(case.page_size, kv_layout=case.storage.kv_layout)},
        {"dtype": usual, "kv_dtype": usual, "arithmetic": scope.ranges.arithmetic(usual, usual)},
        {"top_k": 0, "entries": None, "top_k_lens": False},
        *({name: getattr(AttentionCase, name)} for name in PLAINER),
    ]
    for at in range(0, len(case.kv_lens), size):
        lens = (("kv_lens", case.kv_lens), ("q_lens", case.q_lens))
        changes.append({name: (*each[:at], *each[at + size :]) for name, each in lens})
    for each in changes:
        with suppress(ValueError):  # an invalid case
            yield replace(case, **each)


CHECK = Check("K1", __doc__, _cases, _judge, drawn=itself, quick=4, nearby=_plainer)
