"""Find wrong or missing elements in the KV index lists of a speculative draft, and writes outside these lists.

A usual test reads few elements of long lists, so that it misses a wrong block of elements, or a write after the end of a list.
This check compares every element of every buffer, guard elements included, with the result of loops over requests, branches and
tokens.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from lab.checks.case_run import CaseRun
from lab.checks.explain.call_features import CallFeatures
from lab.checks.parameters.metadata import features_of
from lab.checks.parameters.metadata_axes import NARROW, draft_lens
from lab.checks.parameters.models import Configuration
from lab.checks.properties.check import Check, Scope
from lab.workloads.inputs.draft_lists import DTYPES, DraftLists, DraftListsCase, in_place
from lab.workloads.interfaces import MetadataFunction

EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025)


def _cases(scope: Scope) -> Iterator[DraftListsCase]:
    yield DraftListsCase(EDGES)
    for topk, page_size in ((2, 1), (1, 16), (2, 16), (3, 32), (3, 64), (2, 128), (2, 256)):
        yield DraftListsCase((0, 1, page_size - 1, page_size, 70), num_steps=4, topk=topk, page_size=page_size)
    yield DraftListsCase((5, 17, 130), topk=2, page_size=16, num_steps=40)  # more steps than a page holds
    yield DraftListsCase(EDGES, window_size=60, sink_size=4)
    for is_translated in (False, True):
        yield DraftListsCase(
            (0, 1, 15, 16, 70, 513), 4, 2, 16, translated=is_translated, entries_are_pages=not is_translated
        )
    yield DraftListsCase(
        (5, 700, 17),
        topk=2,
        page_size=64,
        window_size=300,
        entries_are_pages=True,
        translated=True,
        positions_differ=True,
    )


def _judge(run: CaseRun) -> None:
    _expect_right(run, "the lists", DraftLists(run.case, str(run.device)))


def _expect_right(run: CaseRun, what: str, lists: DraftLists, features: CallFeatures | None = None) -> bool:
    wrongs = lists.wrongs(in_place(run.function(MetadataFunction.DRAFT_KV_INDICES)))
    run.judged += 1
    run.expect(what, wrongs, "lists", features)
    return not wrongs


def judge_lists(run: CaseRun) -> None:
    """Judge the KV index lists of the speculative draft `run.case`, then the lists of a second draft in the same buffers."""
    of: Configuration = run.case
    given = {name: value for name, value in of.values.items() if name in DraftListsCase.__dataclass_fields__}
    given |= {"dtypes": {name: torch.int32 if name in NARROW[of["dtypes"]] else torch.int64 for name in DTYPES}}
    case = DraftListsCase(
        draft_lens(of["requests"], of["prefixes"], of["page_size"], of.seed),
        positions_differ=of["positions"] == "others",
        repeated=of["rows"] == "one for all",
        seed=of.seed,
        entries_are_pages=of["entries"] == "pages",
        **given,
    )
    features = features_of(run, case)
    # Both are built before the call: if a device lacks the memory for them, the case is not judged.
    drafts = (case, replace(case, lens=case.lens[::-1], seed=case.seed + 1))
    lists, others = (DraftLists(each, str(run.device)) for each in drafts)
    if _expect_right(run, "the lists", lists, features):
        lists.take(others)
        _expect_right(run, "the lists of others in the same tensors", lists, features)


CHECK = Check("L1", __doc__, _cases, _judge, interfaces=(MetadataFunction.DRAFT_KV_INDICES,), quick=5)
