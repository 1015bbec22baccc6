"""Find off-by-one errors at boundaries of pages, tiles, windows, splits and warps, and errors for lengths of zero.

The requests of a batch have lengths around these boundaries, and lengths 0 and 1, in random order. Needles (a few keys that
outweigh all others) lie at the first and last keys that each row sees.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.parameters.attention import NUM_BUILDS, edge_lengths
from lab.checks.parameters.paged_axes import RANKS
from lab.checks.properties.check import Check, Scope, of_rank
from lab.workloads.attention_case import AttentionCase, Contents

MOST_REQUESTS = 16
MOST_PAIRED_REQUESTS = 2048
# Multiples of the largest tiles and splits, and one key more, so that the rows of a request end on both sides of a boundary.
LONG_TILES = (1024, 1025, 1536)
LONG_PROMPTS = [(300, 290), (60, 3), (513, 513)]  # (kv_len, q_len): more rows than a tile of 256
LONGEST_PROMPT = [(4300, 4200), (9, 2)]  # more than 64 tiles of 64 rows
MANY_ROWS = [*[(128, 128)] * 513, (140, 9)]  # more than 65,535 rows
MANY_PAIRS = 65_536  # (row, query head) pairs: one more than the second axis of a CUDA grid can have
# (kv_len, q_len) of a prompt with more rows than a tile of 128. Some kernels have separate code for short requests in its
# batch.
PROMPT = (150, 140)
DECODES = ((40, 1), (41, 1))
FEW_ROWS = (16, 64, 32)  # numbers of rows times heads of a group up to which these kernels use separate code
ROWS_OF_A_TILE = 32  # rows times heads of a group at which XQA's SM90 fp8 kernel changes its layout


def _cases(scope: Scope) -> Iterator[AttentionCase]:
    interface, ranges = scope.interface, scope.ranges
    for case in scope.balanced(4, 24, seed=15):
        lengths = [0, *edge_lengths(case.page_size, ranges.longest)]
        if case.window_left >= 0:
            lengths += [case.window_left + near for near in (0, 1, 2) if case.window_left + near]
        at_once = len(lengths) if scope.is_full else MOST_REQUESTS
        step = max(1, -(-len(lengths) // at_once))
        chosen = tuple(sorted(set(lengths))[case.seed % step :: step])
        q_lens = (case.q_lens[0],) * len(chosen)
        if interface is AttentionCall.CONTEXT:
            q_lens = tuple(max(1, min(kv_len, (1, 2, 65)[place % 3])) for place, kv_len in enumerate(chosen))
        # Requests with fewer keys than rows are separate cases, because some kernels refuse them.
        enough = [(kv_len, q_len) for kv_len, q_len in zip(chosen, q_lens, strict=True) if kv_len >= q_len]
        longest = max(enough)
        random.Random(case.seed).shuffle(enough)
        yield _of(case, enough)
        fewer = [(kv_len, q_lens[0]) for kv_len in range(q_lens[0])] if interface is not AttentionCall.CONTEXT else []
        if fewer:
            yield _of(case, [*fewer, longest])
        yield _of(case, [longest])
    for case in scope.balanced(1, 4, seed=24):
        q_len = case.q_lens[0]
        if interface is AttentionCall.CONTEXT:
            yield _of(case, LONG_PROMPTS)
            for rows in FEW_ROWS[: scope.counted(2, len(FEW_ROWS))]:
                few = max(1, rows // case.group)
                yield _of(case, [*DECODES, PROMPT, (70, few), (71, few + 1)])
        else:
            yield _of(case, [(0, q_len), (0, q_len)])
        yield _of(case, [(kv_len, min(q_len, kv_len)) for kv_len in LONG_TILES])
    if interface is AttentionCall.CONTEXT and scope.is_full:
        narrow = replace(case, num_kv_heads=1, group=ranges.groups[0], head_dim=min(ranges.head_dims))
        yield _of(narrow, LONGEST_PROMPT)
        yield _of(replace(narrow, window_left=-1), MANY_ROWS)
    if interface is not AttentionCall.CONTEXT:
        yield from _rows_before_a_rank(scope)
        yield from _many_pairs(scope)
    if interface is AttentionCall.DECODE:
        yield from _filled_tiles(scope)


def _rows_before_a_rank(scope: Scope) -> Iterator[AttentionCase]:
    # Some rows see no key, because the rank's keys are later.
    case = max(scope.balanced(NUM_BUILDS, NUM_BUILDS, seed=62), key=lambda case: case.q_lens[0])
    q_len = case.q_lens[0]
    for rank, world in filter(None, RANKS.values()):
        num_keys = len(range(rank, q_len, world))  # keys on this rank of a request without a prefix
        if 0 < rank < q_len:
            yield of_rank((rank, world), _of(case, [(num_keys, q_len)] * world + [(scope.ranges.longest, q_len)]))


def _many_pairs(scope: Scope) -> Iterator[AttentionCase]:
    each = scope.balanced(NUM_BUILDS, NUM_BUILDS, seed=61)
    case = max(each, key=lambda case: case.q_lens[0] * case.num_qo_heads / case.head_dim)
    q_len = case.q_lens[0]
    count = MANY_PAIRS // (q_len * case.num_qo_heads) + 1
    if count <= MOST_PAIRED_REQUESTS:
        yield _of(case, [(q_len + number % 5, q_len) for number in range(count)])


def _filled_tiles(scope: Scope) -> Iterator[AttentionCase]:
    # The rows of a request times the group exactly fill a tile, or exceed it by one row.
    ranges = scope.ranges
    for number, case in enumerate(scope.balanced(1, 4, seed=16)):
        for group in ranges.groups:
            for q_len in sorted({ROWS_OF_A_TILE // group, ROWS_OF_A_TILE // group + 1} & set(ranges.q_lens)):
                yield _of(replace(case, group=group, seed=number), [(40, q_len), (case.page_size + q_len, q_len)])


def _of(case: AttentionCase, requests: list[tuple[int, int]]) -> AttentionCase:
    kv_lens, q_lens = zip(*requests, strict=True)
    return replace(case, kv_lens=kv_lens, q_lens=q_lens, contents=Contents.NEEDLES)


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    run.expect_call("the call", inputs, inputs.truth())


CHECK = Check("K13", __doc__, _cases, _judge)
