"""A wrong cell of a draft's K/V lists, a missing one, or one written outside them.

Lists are long and nothing reads most of them, so a missing block or a store too far stays unseen. Here every cell of every
buffer is held to loops over requests, branches and tokens, the guard cells around them included.
"""

from collections.abc import Iterator

import torch

from lab.checks.check import Check, Level, first_line
from lab.checks.draft_lists import DTYPES, DraftLists, DraftListsCase, in_place
from lab.checks.space import Space
from lab.checks.trial import Trial
from lab.workloads.interfaces import Interface

EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025)


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[DraftListsCase]:
    yield DraftListsCase(EDGES)
    yield DraftListsCase((5,), num_steps=1)
    yield DraftListsCase((3, 700, 0, 129), dtypes=dict.fromkeys(DTYPES, torch.int32), positions_differ=True)
    for topk, page_size in ((2, 1), (4, 1), (1, 16), (2, 16), (3, 64)):
        yield DraftListsCase((0, 1, page_size - 1, page_size, 70), num_steps=4, topk=topk, page_size=page_size)
    yield DraftListsCase((9, 130, 4), spare_capacity=-20)
    yield DraftListsCase((9, 130, 4), spare_columns=-2)
    yield DraftListsCase((5, 70), topk=8)
    yield DraftListsCase((5, 130), topk=2, page_size=128)
    yield DraftListsCase((5, 17, 130), topk=2, page_size=16, num_steps=40)  # more steps than a page holds
    yield DraftListsCase((9000, 70))
    yield DraftListsCase(tuple(range(40)) * 14)
    yield DraftListsCase(tuple(range(4)) * 300)  # more requests than a block of 1,024 threads
    if level is Level.FULL:
        for seed in range(24):
            generator = torch.Generator().manual_seed(seed)
            lens = tuple(torch.randint(0, 600, (1 + seed,), generator=generator).tolist())
            yield DraftListsCase(
                lens,
                num_steps=1 + seed % 6,
                topk=1 + seed % 3,
                page_size=(1, 16, 64)[seed % 3],
                repeated=seed % 5 == 0,
                row_gap=seed % 4,
                seed=seed,
            )


def _judge(trial: Trial) -> None:
    wrongs = DraftLists(trial.case, str(trial.device)).wrongs(in_place(trial.function(Interface.DRAFT_KV_INDICES)))
    trial.judged += 1
    trial.hold_nothing_wrong("the lists", wrongs, held="lists")


CHECK = Check("L1", "draft_lists", first_line(__doc__), _cases, _judge, interfaces=(Interface.DRAFT_KV_INDICES,))
