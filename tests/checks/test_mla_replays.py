"""The MLA backend's replay sequences: right runners pass all of them, and each deliberate defect is found."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from corpus.kernels import kernel
from lab.checks import Outcome, ReplaySequence, judge_case
from lab.kernels import portable
from lab.metadata import DraftAttention, ForwardBatch, KVPool, QueryLayout
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.graph_inputs import MetadataPlace
from lab.workloads.graph_case import MLAGraphCase
from lab.workloads.inputs.replay_fixture import RunnerFactory
from tests.checks.test_graph_replays import MODES, changed, reason, wrong
from tests.devices import IN_INTERPRETER, ON_GPU

SPARSE: dict[str, Any] = {"index_topk": 48}
SHAPE_OF_TWO_POOLS: dict[str, Any] = {"page_size": 128, "qk_rope_head_dim": 0, "num_qo_heads": 1}
DENSE_MODES = [name for name in MODES if name != "frozen_kv_draft"]
SPARSE_MODES = ["decode", "draft_decode", "target_verify", "draft_extend_v2"]


def two_pools(ratio: int) -> dict[str, Any]:
    return SHAPE_OF_TWO_POOLS | {"compress_ratio": ratio, "index_topk": 48 if ratio in (2, 4) else None}


def cases(mode: str, **settings: Any) -> list[MLAGraphCase]:
    """Every sequence, in both places in turn."""
    places = list(MetadataPlace)
    return [MLAGraphCase(MODES[mode], each, places[n % 2], **settings) for n, each in enumerate(ReplaySequence)]


@IN_INTERPRETER
@pytest.mark.parametrize("mode", DENSE_MODES)
def test_every_mode_passes_with_the_references(mode: str) -> None:
    assert wrong(cases(mode)) == {}


@IN_INTERPRETER
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        *((mode, SPARSE) for mode in SPARSE_MODES),
        *(("decode", two_pools(4)), ("draft_decode", two_pools(0)), ("target_verify", two_pools(128))),
        *(("ragged_verify", two_pools(2)), ("draft_extend_v2", two_pools(0))),
    ],
)
def test_selected_entries_pass_with_the_references(mode: str, settings: dict[str, Any]) -> None:
    assert wrong(cases(mode, **settings)) == {}


@IN_INTERPRETER
def test_a_draft_step_that_counts_its_own_token_passes_on_both_page_sizes() -> None:
    counting = cases("draft_decode", attention=DraftAttention.MLA_WITH_OFFSET)
    assert wrong(replace(case, page_size=(32, 64)[number % 2]) for number, case in enumerate(counting)) == {}


@IN_INTERPRETER
def test_the_portable_kernel_passes() -> None:
    """Padded rows, of unequal numbers, and selected entries: the other modes' calls are simpler."""
    given: tuple[tuple[str, dict[str, Any]], ...] = (
        ("draft_extend", {"num_pages": 4}),
        ("target_verify", {"num_pages": 4, **SPARSE}),
        ("decode", two_pools(128)),
    )
    poisoned = (MLAGraphCase(MODES[mode], ReplaySequence.POISONED, **settings) for mode, settings in given)
    assert wrong(poisoned, portable) == {}


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        *((mode, {"place": place}) for mode in DENSE_MODES for place in MetadataPlace),
        *((mode, SPARSE) for mode in SPARSE_MODES),
    ],
)
def test_the_portable_kernel_passes_in_real_graphs(mode: str, settings: dict[str, Any], device: str) -> None:
    for sequence in ReplaySequence:
        case = MLAGraphCase(MODES[mode], sequence, **settings)
        verdict = judge_case("lab.kernels.portable", "S2", case, device)
        assert verdict.outcome is Outcome.RIGHT, verdict


# --- deliberate defects -----------------------------------------------------------------------------------------------

# Spoils a rebuild of metadata: the part before `yield` runs before the rebuild, and the rest after it.
Spoil = Callable[[Any], Iterator[None]]


def spoilt(spoil: Spoil) -> RunnerFactory:
    """Return a maker of runners that spoil each rebuild of the backend's own buffers."""

    def make(backend: Any, case: MLAGraphCase, pool: KVPool, sizes: Sequence[int], body: Any) -> GraphRunner[Any]:
        buffers = backend.new_buffers([case.mode], pool, max(sizes))[case.mode]
        right = buffers.prepare

        def prepare(view: ForwardBatch) -> Callable[[], None]:
            rebuild, metadata = right(view), buffers.slices(view.batch_size)

            def run() -> None:
                spoiling = spoil(metadata)
                next(spoiling)
                rebuild()
                next(spoiling, None)

            return run

        buffers.prepare = prepare
        return GraphRunner(backend, case.mode, pool, sizes, body, case.place, metadata=buffers)

    return make


def after(change: Callable[[Any], Any]) -> Spoil:
    def spoil(metadata: Any) -> Iterator[None]:
        yield
        change(metadata)

    return spoil


def kept(*names: str, of: Any = slice(None)) -> Spoil:
    """Keep the cells `of` some tensors as they were captured."""

    def spoil(metadata: Any) -> Iterator[None]:
        tensors = [getattr(metadata, name)[of] for name in names]
        before = [tensor.clone() for tensor in tensors]
        yield
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)

    return spoil


def first_pages_are_the_first_requests(metadata: Any) -> None:
    metadata.block_kv_indices[1:, 0] = metadata.block_kv_indices[0, 0]


def padding_not_counted(metadata: Any) -> None:
    metadata.seq_lens_k.add_(metadata.seq_lens_q).sub_(metadata.max_seq_len_q)


def boundaries_of_full_rows(metadata: Any) -> None:
    """Make cu_seqlens_q as if every request had accepted all."""
    steps = torch.arange(len(metadata.cu_seqlens_q), dtype=torch.int32) * metadata.max_seq_len_q
    metadata.cu_seqlens_q.copy_(steps)


def lengths_of_last_rows(metadata: Any) -> None:
    """Give the four rows of each request the length of its last row."""
    metadata.seq_lens.copy_(metadata.seq_lens[3::4].repeat_interleave(4))


SIZES = ReplaySequence.TWO_CAPTURED_SIZES
DEFECTS: dict[str, tuple[Spoil, str, ReplaySequence, dict[str, Any]]] = {
    "length off by one": (after(lambda m: m.seq_lens_k.sub_(1)), "decode", ReplaySequence.CAPTURED_BELOW_Q, {}),
    "pages of the first request": (after(first_pages_are_the_first_requests), "target_verify", SIZES, {}),
    "the fourth column stale": (
        *(kept("block_kv_indices", of=(slice(None), 3)), "draft_extend_v2", ReplaySequence.AFTER_A_LONGER_BATCH, {}),
    ),
    "padding not counted": (after(padding_not_counted), "draft_extend", ReplaySequence.EAGER_EQUALS_REPLAY, {}),
    "rows not accepted": (after(boundaries_of_full_rows), "draft_extend", ReplaySequence.POISONED, {}),
    "not rebuilt": (kept("seq_lens_k", "block_kv_indices"), "draft_decode", ReplaySequence.A_B_A, {}),
    "sparse lengths of last rows": (after(lengths_of_last_rows), "target_verify", SIZES, SPARSE),
    "sparse places stale": (kept("page_table_1"), "draft_extend_v2", SIZES, SPARSE),
    "sparse draft counts itself": (after(lambda m: m.seq_lens.add_(1)), "draft_decode", SIZES, SPARSE),
    "stale window": (kept("window"), "decode", SIZES, two_pools(0)),
    "stale table of 128": (kept("page_table"), "decode", SIZES, two_pools(128)),
    "stale table of 4": (kept("page_table"), "decode", SIZES, two_pools(4)),
    "stale lengths of two pools": (kept("seq_lens"), "decode", SIZES, two_pools(0)),
}


@IN_INTERPRETER
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_the_metadata_is_found(defect: str) -> None:
    spoil, mode, sequence, settings = DEFECTS[defect]
    assert reason(MLAGraphCase(MODES[mode], sequence, **settings), make=spoilt(spoil))


@IN_INTERPRETER
def test_rows_as_they_lie_are_found_in_the_first_draft_extend() -> None:
    """What SGLang 0.5.12 captures."""

    def make(backend: Any, case: MLAGraphCase, *given: Any) -> GraphRunner[Any]:
        return GraphRunner(replace(backend, draft_extend=QueryLayout.VIEW), case.mode, *given, case.place)

    assert reason(MLAGraphCase(MODES["draft_extend"], ReplaySequence.EAGER_EQUALS_REPLAY), make=make)


@IN_INTERPRETER
def test_a_wrong_implementation_is_found() -> None:
    wrong_kernel = kernel("mla_last_key_lost").implementation()
    for sequence in ReplaySequence:
        assert "output vectors are wrong" in reason(MLAGraphCase(MODES["decode"], sequence), wrong_kernel)


@IN_INTERPRETER
def test_buffers_that_move_are_told() -> None:
    def move(made: Any) -> None:
        replay, metadata = made.replay, made.metadata

        def moving(batch: ForwardBatch) -> Any:
            metadata.buffers = replace(metadata.buffers, seq_lens_k=metadata.buffers.seq_lens_k.clone())
            return replay(batch)

        made.replay = moving

    assert "moved" in reason(MLAGraphCase(MODES["decode"], ReplaySequence.SAME_BUFFERS), make=changed(move))
