"""Find a query row that uses a wrong key or omits a key, and exchanged pages, heads or positions.

With random data each key weighs 1/kv_len, so that rounding hides an error of one key. In some cases of this check the query is
zero and each value encodes its position, so that the output counts the keys. In the other cases, needles (a few keys that
outweigh all others) lie at the first and last keys that each row sees, and just outside.
"""

from collections.abc import Iterator
from dataclasses import replace

from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.parameters.attention import edge_lengths
from lab.checks.properties.check import Check, Scope
from lab.workloads.attention_case import AttentionCase, Contents

LONG = 8192  # keys of a long request: 64 splits of 128 keys, more than some kernels can merge
MOST_COUNTED = 200  # most keys of a request of counted keys: one key more changes the output by more than bf16's bound


def _cases(scope: Scope) -> Iterator[AttentionCase]:
    for case in scope.balanced(8, 48, seed=4):
        yield replace(case, contents=Contents.NEEDLES)
        lengths = [length for length in edge_lengths(case.page_size, MOST_COUNTED) if length >= max(case.q_lens)]
        kv_lens = tuple(lengths[(case.seed + 3 * request) % len(lengths)] for request in range(len(case.q_lens)))
        yield replace(case, kv_lens=kv_lens, contents=Contents.COUNTED)
    for case in scope.balanced(1, 4, seed=19):
        case = case if case.is_mla else scope.on_fewest_heads(case)
        kv_lens = (LONG + case.page_size // 2 + 1, case.kv_lens[1])
        yield replace(case, kv_lens=kv_lens, q_lens=case.q_lens[:2], window_left=-1, contents=Contents.NEEDLES)
    if scope.interface is not AttentionCall.MLA_DECODE and True in scope.ranges.windows:
        for case in scope.balanced(4, 24, seed=5):
            edges = (0, 1, case.page_size - 1, case.page_size)
            window_left = edges[case.seed % len(edges)]
            yield replace(case, window_left=window_left, contents=Contents.NEEDLES)


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    truth = inputs.truth()
    what = run.case.contents.name.lower()
    run.expect_call(what, inputs, truth)
    if max(run.case.kv_lens) > LONG:
        run.expect_close("with the LSE", run.vary("return_lse", inputs, return_lse=True), truth)


CHECK = Check("K3", __doc__, _cases, _judge, drawn=lambda case: replace(case, contents=Contents.NEEDLES))
