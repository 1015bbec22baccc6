"""Slots of -1 and virtual pages without a page, among the tokens of requests for which metadata is built."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lab.metadata
from lab.checks import Configuration, Outcome, Ranges
from lab.checks.properties.k18_combinations import CHECK
from lab.checks.run.judging import run_case
from lab.checks.run.verdicts import Judged
from lab.workloads.interfaces import MetadataFunction

MHA, MLA = MetadataFunction.MHA_METADATA, MetadataFunction.MLA_METADATA
PLAIN, VIRTUAL = "where they lie, some -1", "virtual, some -1 or without a page"
SEEN: list[tuple[Any, Any]] = []


def judged(function: MetadataFunction, changed: Any = lambda metadata, pool: metadata, **values: Any) -> Judged:
    def build(batch: Any, pool: Any, **options: Any) -> Any:
        SEEN[:] = [(copy.deepcopy(batch), copy.deepcopy(pool))]  # the judge changes them afterwards
        return changed(getattr(lab.metadata, function.value)(batch, pool, **options), pool)

    case = Configuration(function, values)
    return run_case(SimpleNamespace(**{function.value: build}), CHECK, case, torch.device("cpu"), Ranges())


@pytest.mark.parametrize("function", [MHA, MLA])
@pytest.mark.parametrize("slots", [PLAIN, VIRTUAL])
@pytest.mark.parametrize("later", ["the same", "longer", "slots renumbered", "another pool"])
def test_the_builders_are_right_and_live_tokens_have_holes(function: MetadataFunction, slots: str, later: str) -> None:
    assert judged(function, slots=slots, later=later).outcome is Outcome.RIGHT
    ((batch, pool),) = SEEN
    of_requests = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    live = [pool.req_to_token[row, :length] for row, length in of_requests]
    assert any((tokens == -1).any() and (tokens != -1).any() for tokens in live)
    assert (pool.v2p is not None) == (slots == VIRTUAL)
    if pool.v2p is not None:
        assert any((pool.v2p[tokens[tokens >= 0].long() // pool.page_size] == -1).any() for tokens in live)


@pytest.mark.parametrize("function", [MHA, MLA])
@pytest.mark.parametrize("slots", [PLAIN, VIRTUAL])
def test_a_builder_that_takes_a_hole_for_another_page_is_wrong(function: MetadataFunction, slots: str) -> None:
    name = "page_table" if function is MHA else "block_kv_indices"

    def changed(metadata: Any, pool: Any) -> Any:
        (batch, _) = SEEN[0]
        table = getattr(metadata, name)
        first = pool.req_to_token[batch.req_pool_indices, 0]
        table[:, 0].masked_fill_(first == -1, 7)
        return metadata

    assert judged(function, changed, slots=slots).outcome is Outcome.WRONG
    assert judged(function, changed, slots="virtual").outcome is Outcome.RIGHT
