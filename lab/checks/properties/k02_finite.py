"""Find NaN or infinity, from very low logits, partial maxima that are far apart, large sinks, and rows that see no key.

With random inputs, logits lie within ±10 and every row sees a key. Such a test misses a running maximum that starts at -1e5,
exp(-inf + inf), and 0/0. Here all three matter. A row that sees no key must be zero, with an LSE of minus infinity.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from lab.checks.case_run import CaseRun, Result
from lab.checks.properties.check import Check, Scope
from lab.references.errors import Truth
from lab.workloads.attention_case import AttentionCase, Contents

# Far above every random logit. With a larger sink an fp16 output underflows, and an e4m3 output with any.
LARGE_SINK = {torch.bfloat16: 30.0, torch.float16: 6.0}
# Float32 logits near -290,000 (base 2) have a spacing of 1/32, so that merged splits have relative errors of 2**(1/32) - 1.
ROUNDED_LOGITS = 0.03


def _cases(scope: Scope) -> Iterator[AttentionCase]:
    for case in scope.balanced(4, 16, seed=2):
        yield (tall := replace(case, contents=Contents.TALL))
        yield replace(case, contents=Contents.LOW)
        if not case.is_mla and True in scope.ranges.windows:
            yield replace(tall, window_left=case.page_size - 1, sinks=True in scope.ranges.sinks)
    for case in scope.balanced(2, 8, seed=3):
        # The first request has fewer keys than rows, the last has no keys: some rows see no key.
        short = case.with_rows(*case.q_lens).kv_lens
        case = replace(case, kv_lens=(max(case.q_lens[0] - 1, 0), *short[1:-1], 0))
        yield case
        if case.is_mla and True in scope.ranges.sinks:
            yield replace(case, sinks=True)


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    truth = inputs.truth()
    least_bound = ROUNDED_LOGITS if run.case.contents is Contents.LOW else 0.0
    _expect_finite(run, "the call", run.expect_call("the call", inputs), truth, least_bound)
    _expect_finite(run, "with the LSE", run.vary("return_lse", inputs, return_lse=True), truth, least_bound)
    if True in run.ranges.sinks and 0 in run.case.kv_lens:
        none = torch.full((run.case.num_qo_heads,), -math.inf, device=run.device)
        result = run.vary("sinks of minus infinity", inputs, sinks=none)
        _expect_finite(run, "sinks of minus infinity", result, inputs.truth(sinks=None))
    if inputs.sinks is not None and run.case.dtype in LARGE_SINK:
        sinks = inputs.sinks + LARGE_SINK[run.case.dtype]
        result = run.vary("large sinks", inputs, sinks=sinks)
        _expect_finite(run, "large sinks", result, inputs.truth(sinks=sinks), least_bound)


def _expect_finite(run: CaseRun, what: str, result: Result | None, truth: Truth, least_bound: float = 0.0) -> None:
    if result is None:
        return
    run.expect_close(what, result, truth, least_bound)
    bad = ~result.out.to(torch.float32).isfinite()
    if bool(bad.any()):
        requests = truth.request_of_row[bad.flatten(1).any(dim=1)].unique().tolist()
        run.wrongs.append(f"{what}: {int(bad.sum())} elements are not finite, of requests {requests}")
    if result.lse is not None and bool(result.lse.isnan().any()):
        run.wrongs.append(f"{what}: the LSE holds NaN")


CHECK = Check("K2", __doc__, _cases, _judge)
