"""The draft's K/V lists compiled for a GPU: thousands of drafts, nothing compiled twice, no synchronisation, CUDA graphs."""

import itertools
import random

import pytest
import torch

from lab.kernels.serving import draft_decode_kv_indices as module
from lab.kernels.serving.draft_decode_kv_indices import Schedule, generate_draft_decode_kv_indices
from lab.workloads.inputs.draft_lists import DTYPES, DraftLists, DraftListsCase
from tests.devices import ON_GPU, graph_of, synchronisation_is_an_error
from tests.kernels.test_draft_decode_kv_indices import EDGES, NARROW, scheduled

pytestmark = [*ON_GPU]

MIXED = DTYPES | {"req_to_token": torch.int32, "kv_indices": torch.int32, "kv_indptr": torch.int32}
# What is compiled for: the engine's dtypes and two extremes, each with some steps, branches and pages.
COMPILED = [
    (steps, topk, page_size, dtypes)
    for dtypes in (MIXED, NARROW, DTYPES)
    for steps, topk, page_size in ((2, 1, 1), (3, 1, 64), (5, 2, 4), (3, 3, 16), (8, 1, 16), (4, 2, 1), (3, 2, 64))
]
# The parameters beside these, each with some of them: none, or one at a time, or all.
FORMS = [
    {},
    {"window_size": 40, "sink_size": 4},
    {"entries_are_pages": True},
    {"translated": True},
    {"window_size": 600, "entries_are_pages": True, "translated": True},
]
BATCHES = 50  # shards of the random cases: one test each, so that a failure is one of few
CASES_PER_BATCH = 24


def random_case(draw: random.Random) -> DraftListsCase:
    steps, topk, page_size, dtypes = compiled = draw.choice(COMPILED)
    form = draw.choice([{}, FORMS[COMPILED.index(compiled) % len(FORMS)]])
    kind = draw.random()
    if kind < 0.05:  # more requests than are summed at a time
        lens = [draw.randrange(6) for _ in range(draw.choice([257, 513, 700]))]
    elif kind < 0.3:  # longer than a block of either schedule, or around its edges
        lens = [draw.choice([*EDGES, draw.randrange(3000)]) for _ in range(draw.randrange(1, 5))]
    else:
        lens = [draw.randrange(70) for _ in range(draw.randrange(1, 12))]
    return DraftListsCase(
        tuple(lens),
        num_steps=steps,
        topk=topk,
        page_size=page_size,
        positions_differ=draw.random() < 0.3,
        repeated=draw.random() < 0.2,
        spare_columns=draw.randrange(-3, 20),
        row_gap=draw.randrange(6),
        spare_capacity=draw.randrange(-9, 20),
        spare_boundaries=draw.randrange(3),
        first_cell=draw.randrange(1, 10),
        dtypes=dtypes,
        seed=draw.randrange(2**16),
        **form,
    )


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("schedule", Schedule, ids=repr)
def test_random_cases(schedule: Schedule, batch: int) -> None:
    """1,200 of them, by each schedule."""
    draw = random.Random(batch)
    for _ in range(CASES_PER_BATCH):
        assert DraftLists(random_case(draw), "cuda").wrongs(scheduled(schedule)) == []


@pytest.mark.parametrize("schedule", Schedule, ids=repr)
def test_no_batch_compiles_again(schedule: Schedule) -> None:
    """Batch size, row width, lengths and where slices start are no reason to compile; steps and branches are."""
    kernel = module._spread_kernel if schedule is Schedule.SPREAD else module._serial_kernel
    cache = kernel.device_caches[torch.cuda.current_device()][0]
    before = len(cache)
    for length in (100, 101):  # kv_indices alone is compiled for where it starts: at a multiple of 16 bytes or not
        case = DraftListsCase((length,), 7, 1, 32, first_cell=16)
        assert DraftLists(case, "cuda").wrongs(scheduled(schedule)) == []
    compiled = len(cache)
    assert before < compiled <= before + 2
    for lens, columns, gap, start in itertools.product([(1,), (16,) * 16, (3,) * 600], [0, 1, 16], [0, 5], [1, 2]):
        case = DraftListsCase(lens, 7, 1, 32, spare_columns=columns, row_gap=gap, first_cell=16 * start)
        assert DraftLists(case, "cuda").wrongs(scheduled(schedule)) == []
    assert len(cache) == compiled
    case = DraftListsCase((100,), 6, 1, 32, first_cell=16)
    assert DraftLists(case, "cuda").wrongs(scheduled(schedule)) == []
    assert len(cache) > compiled


@pytest.mark.parametrize("schedule", Schedule, ids=repr)
def test_a_graph_writes_what_the_lengths_then_are(schedule: Schedule) -> None:
    longest = DraftLists(DraftListsCase((900, 40, 513)), "cuda")
    tensors = longest.arguments
    with synchronisation_is_an_error():
        generate_draft_decode_kv_indices(**tensors, schedule=schedule)
    graph = graph_of(lambda: generate_draft_decode_kv_indices(**tensors, schedule=schedule))
    table, rows = tensors["req_to_token"], tensors["req_pool_indices"].tolist()
    for lens in ((7, 0, 512), (900, 40, 513)):
        tensors["paged_kernel_lens"].copy_(torch.tensor(lens))
        graph.replay()
        for step, written in enumerate(tensors["kv_indices"]):
            expected = torch.cat([table[row, : n + step + 1] for row, n in zip(rows, lens, strict=True)])
            assert torch.equal(written[: len(expected)], expected)
