"""A key that should not have been seen, or was not, and a page, head or position taken for another.

With random data each key weighs 1/length, and one more or less drowns in rounding. Zero queries over values that name their
position make the output a count of the keys that were seen; needles, a few keys that outweigh all others, stand at the limits
of what each row sees, and just beyond them.
"""

from collections.abc import Iterator
from dataclasses import replace

from lab.checks.case_run import CaseRun, Then
from lab.checks.parameters.attention import balanced, drawn_cases, edge_lengths
from lab.checks.properties.check import Check, Level, counted, first_line
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Contents
from lab.workloads.interfaces import Interface

LONG = 8192  # keys: 64 splits of 128, more than some merges hold
MOST_COUNTED = 200  # one key more changes the output by a hundredth, above the bound of bf16


def _cases(interface: Interface, ranges: Ranges, level: Level) -> Iterator[AttentionCase]:
    for case in balanced(ranges, interface, counted(level, 8, 48), seed=4):
        yield replace(case, contents=Contents.NEEDLES)
        yield _few_keys(case)
    for case in balanced(ranges, interface, counted(level, 1, 4), seed=19):
        yield _long(case, ranges)
    if interface is not Interface.MLA_DECODE and True in ranges.windows:
        for case in balanced(ranges, interface, counted(level, 4, 24), seed=5):
            edges = (0, 1, case.page_size - 1, case.page_size)
            window_left = edges[case.seed % len(edges)]
            yield replace(case, window_left=window_left, contents=Contents.NEEDLES)


def _long(case: AttentionCase, ranges: Ranges) -> AttentionCase:
    """Return one request of many splits, on the fewest heads, to save time."""
    few = replace(case, kv_lens=(LONG + case.page_size // 2 + 1, case.kv_lens[1]), q_lens=case.q_lens[:2])
    if not case.is_mla:
        few = replace(few, num_kv_heads=min(ranges.num_kv_heads), group=min(ranges.groups), window_left=-1)
    return replace(few, contents=Contents.NEEDLES)


def _few_keys(case: AttentionCase) -> AttentionCase:
    lengths = [length for length in edge_lengths(case.page_size, MOST_COUNTED) if length >= max(case.q_lens)]
    kv_lens = tuple(lengths[(case.seed + 3 * request) % len(lengths)] for request in range(len(case.q_lens)))
    return replace(case, kv_lens=kv_lens, contents=Contents.COUNTED)


def _drawn(case: AttentionCase) -> AttentionCase:
    return replace(case, contents=Contents.NEEDLES)


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    truth = inputs.truth()
    what = run.case.contents.name.lower()
    run.expect_close(what, run.call(inputs, what, on_failure=Then.NOTE), truth)
    if max(run.case.kv_lens) > LONG:
        run.expect_close("with the LSE", run.vary("return_lse", inputs, return_lse=True), truth)


CHECK = Check("K3", "coded", first_line(__doc__), _cases, _judge, draw=drawn_cases(_drawn))
