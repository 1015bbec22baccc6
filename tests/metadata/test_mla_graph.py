"""MLA's metadata in graphs: buffers of several modes and sizes, what replays leave behind, and attention over histories.

On a CPU a replay makes the captured calls again, on the same buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lab.references
from lab.metadata import DraftAttention, ForwardBatch, KVPool, QueryLayout, TRTLLMMLADecodeMetadata
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.mla.buffers import MLAGraphMetadata
from lab.metadata.mla.calls import prepare_mla_attention
from lab.metadata.mla.metadata import build_mla_decode_metadata
from lab.metadata.speculation.draft_steps import DraftPlan, MultiStepDraft, build_draft_steps
from tests.devices import DEVICES, IN_INTERPRETER, ON_GPU, synchronisation_is_an_error
from tests.metadata.mha_cases import DRAFT_EXTENDS, Case, build
from tests.metadata.mla_cases import (
    HEADS,
    LAYER,
    MLA,
    MLA_WITH_OFFSET,
    PAGE_SIZES,
    RANK,
    ROPE,
    Engine,
    assert_live_part_right,
)

V1, V2 = DRAFT_EXTENDS
D = 4
DECODE, VERIFY = GraphMode.decode(), GraphMode.target_verify(D)
RAGGED = GraphMode.ragged_verify(D)
EXTEND_V1, EXTEND_V2 = GraphMode.draft_extend(D), GraphMode(V2, D)
MODES = [DECODE, GraphMode.draft_decode(0), GraphMode.draft_decode(2), VERIFY, RAGGED, EXTEND_V1, EXTEND_V2]
# Every mode, and the draft steps with the offset besides: other modes ignore it.
WITH_ATTENTION = [(mode, MLA) for mode in MODES] + [(mode, MLA_WITH_OFFSET) for mode in MODES[1:3]]
# Each page size with one of the places where metadata is rebuilt.
PLACES = [(32, MetadataPlace.IN_GRAPH), (64, MetadataPlace.BEFORE_REPLAY)]
CONTEXT = 200
DISCOVERY = Case(V1, (6, 92, 173, 37), (1, 2, 3, 4), page_size=32, max_context_len=CONTEXT, sliding_window=False)


def name_of(value: object) -> str | None:
    return f"{value.forward_mode.name}-{value.draft_step}" if isinstance(value, GraphMode) else None


def case_of(mode: GraphMode, totals: tuple[int, ...], page_size: int = 32) -> Case:
    """Lengths with this pass's tokens; the first draft extend's requests have 1, 2, 3, ... of them in turn."""
    new = 0 if mode.draft_step is None else mode.draft_step + 1
    if mode in (VERIFY, RAGGED):
        new = D
    unequal = mode in (EXTEND_V1, RAGGED)
    rows = tuple(1 + i % D if unequal else D for i in range(len(totals))) if mode.in_extend_seq_lens else ()
    return Case(
        mode.forward_mode, totals, rows, new, page_size=page_size, max_context_len=CONTEXT, sliding_window=False
    )


def nothing(view: ForwardBatch, metadata: TRTLLMMLADecodeMetadata) -> Callable[[], Any]:
    return lambda: None


def buffers_of(
    pool: KVPool, max_batch_size: int, modes: list[GraphMode], attention: DraftAttention = MLA, **layout: QueryLayout
) -> dict[GraphMode, MLAGraphMetadata]:
    return TRTLLMMLABackend(None, attention, **layout).new_buffers(modes, pool, max_batch_size)


def runner_of(
    buffers: MLAGraphMetadata, sizes: tuple[int, ...] = (2, 4), place: Any = MetadataPlace.IN_GRAPH
) -> GraphRunner[TRTLLMMLADecodeMetadata]:
    backend = TRTLLMMLABackend(attention=buffers.attention)
    return GraphRunner(backend, buffers.mode, buffers.pool, sizes, nothing, place, metadata=buffers)


def replay(runner: GraphRunner[TRTLLMMLADecodeMetadata], batch: ForwardBatch) -> TRTLLMMLADecodeMetadata:
    runner.replay(batch)
    return runner.captured[runner.size_for(batch.batch_size)].metadata


def assert_replayed(
    got: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool, attention: DraftAttention = MLA
) -> list[list[int]]:
    """The batch's own rows, and what every row of the size must be; returns the tails of the own rows."""
    mode, bs, rows = batch.forward_mode, batch.batch_size, got.max_seq_len_q
    own = replace(got, block_kv_indices=got.block_kv_indices[:bs], seq_lens_k=got.seq_lens_k[:bs])
    tails = assert_live_part_right(own, batch, pool, attention, rows)
    assert got.max_seq_len_k == pool.max_context_len
    if not mode.query_rows.in_extend_seq_lens:
        assert got.cu_seqlens_q is got.seq_lens_q is got.sum_seq_lens_q is None
        return tails
    padding = got.batch_size - bs
    lens = [*(batch.extend_seq_lens_cpu or ()), *[rows] * padding]
    assert got.seq_lens_q is not None
    assert got.cu_seqlens_q is not None
    assert (got.seq_lens_q.dtype, got.seq_lens_q.tolist()) == (torch.int32, lens)
    assert (got.cu_seqlens_q.dtype, got.cu_seqlens_q.tolist()) == (
        torch.int32,
        [sum(lens[:i]) for i in range(len(lens) + 1)],
    )
    assert got.sum_seq_lens_q == rows * got.batch_size
    return tails


# --- buffers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_table_starts_as_minus_one_and_is_as_wide_as_the_context(page_size: int) -> None:
    _, pool = build(replace(DISCOVERY, page_size=page_size, max_context_len=4095))
    for modes, blocks in ((MODES[:4], 1), ([VERIFY, EXTEND_V2], 1), ([DECODE, EXTEND_V1], 2)):
        table = buffers_of(pool, 5, modes)[modes[0]].block_kv_indices
        assert (table.dtype, list(table.shape)) == (torch.int32, [5, blocks * 4096 // page_size])
        assert (table == -1).all()
    as_they_lie = buffers_of(pool, 5, [EXTEND_V1], draft_extend=QueryLayout.VIEW)[EXTEND_V1]
    assert as_they_lie.block_kv_indices.shape[1] == 4096 // page_size


@IN_INTERPRETER
def test_two_modes_at_one_size_keep_what_is_theirs() -> None:
    """SGLang keeps one entry per size: verification after decode gets decode's, without its own tensors."""
    pool = build(case_of(VERIFY, (60, 97)))[1]
    buffers = buffers_of(pool, 4, MODES)
    runners = {mode: runner_of(buffers[mode]) for mode in MODES}
    assert all(set(buffers[mode].metadata) == {2, 4} for mode in MODES)
    batches = {mode: build(case_of(mode, (60, 97)))[0] for mode in MODES}
    kept = {mode: replay(runners[mode], batches[mode]) for mode in MODES}
    lengths = {mode: kept[mode].seq_lens_k.tolist() for mode in MODES}
    assert lengths[DECODE] == [60, 97]
    assert lengths[GraphMode.draft_decode(2)] == [57, 94]
    assert lengths[VERIFY] == [60, 97]
    assert lengths[EXTEND_V1] == [63, 99]
    storages = {kept[mode].seq_lens_k.data_ptr() for mode in MODES}
    assert len(storages) == len(MODES)
    assert len({kept[mode].block_kv_indices.data_ptr() for mode in MODES}) == 1


def test_other_sizes_and_pools_are_refused() -> None:
    pool = build(DISCOVERY)[1]
    buffers = buffers_of(pool, 4, [DECODE])
    assert set(buffers) == {DECODE}
    for size in (0, 5):
        with pytest.raises(ValueError, match=f"batch_size={size} is not 1 to max_batch_size=4"):
            buffers[DECODE].slices(size)
    with pytest.raises(ValueError, match="max_batch_size=0"):
        buffers_of(pool, 0, [DECODE])
    with pytest.raises(ValueError, match="is not MLA"):
        buffers_of(pool, 4, [DECODE], DraftAttention.MHA)
    for page_size in (16, 128):
        with pytest.raises(ValueError, match=f"page_size={page_size}: .*pages of"):
            buffers_of(build(replace(DISCOVERY, page_size=page_size))[1], 4, [DECODE])


# --- replays ------------------------------------------------------------------------------------------------------


@IN_INTERPRETER
@pytest.mark.parametrize(
    ("layout", "seq_lens_k", "rows"),
    [(QueryLayout.VIEW, [6, 92, 173, 37], [4, 4, 4, 4]), (QueryLayout.PADDED, [9, 94, 174, 37], [1, 2, 3, 4])],
)
def test_the_lengths_that_sglang_was_seen_to_make(layout: QueryLayout, seq_lens_k: list[int], rows: list[int]) -> None:
    """Measured on SGLang's own builder: as a view in the graph, and padded in an eager pass. The lab's graph pads too."""
    batch, pool = build(DISCOVERY)
    got = replay(runner_of(buffers_of(pool, 4, [EXTEND_V1], draft_extend=layout)[EXTEND_V1]), batch)
    assert got.seq_lens_k.tolist() == seq_lens_k
    assert got.query_layout is layout
    assert got.seq_lens_q is not None
    assert got.cu_seqlens_q is not None
    assert got.seq_lens_q.tolist() == rows
    assert got.cu_seqlens_q.tolist() == [sum(rows[:i]) for i in range(5)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("page_size", "place"), PLACES)
@pytest.mark.parametrize(("mode", "attention"), WITH_ATTENTION, ids=name_of)
def test_a_replay_is_the_eager_pass_and_leaves_the_rest(
    mode: GraphMode, page_size: int, place: MetadataPlace, attention: DraftAttention, device: str
) -> None:
    """A long batch, shorter ones, fewer requests, and the first again; tails keep what the longest left."""
    pool = build(case_of(mode, (CONTEXT,) * 4, page_size), device)[1]
    buffers = buffers_of(pool, 4, [mode], attention)[mode]
    runner = runner_of(buffers, place=place)
    # Capture's own requests are padding of one token and no page but the sink's; nothing else is written.
    assert set(buffers.block_kv_indices.unique().tolist()) == {-1, 0}
    long, short = (CONTEXT, 130, 129, 65), (33, 9, 64, 32)
    left: list[list[int]] = []
    addresses: set[int] = set()
    for totals in (long, short, long, short[:3], (32,), long):
        batch = on_requests_of(pool, build(case_of(mode, totals, page_size), device)[0])
        got = replay(runner, batch)
        tails = assert_replayed(got, batch, pool, attention)
        eager = build_mla_decode_metadata(batch, pool, attention)
        if eager.max_seq_len_q == got.max_seq_len_q:
            assert eager.seq_lens_k.tolist() == got.seq_lens_k[: batch.batch_size].tolist()
        cells = buffers.block_kv_indices.tolist()
        if left:  # a tail is as the batches before left it
            assert all(tail == before[-len(tail) :] for tail, before in zip(tails, left, strict=False) if tail)
        left = cells
        addresses.add(buffers.block_kv_indices.data_ptr())
    assert len(addresses) == 1
    stale = replay(runner, on_requests_of(pool, build(case_of(mode, short, page_size), device)[0]))
    columns = -(-CONTEXT // page_size)
    assert (stale.block_kv_indices[0, 3 * 64 // page_size : columns] > 0).all(), "stale pages of the long batch"
    assert (stale.block_kv_indices[:, columns + 1 :] == -1).all(), "never live"


def on_requests_of(pool: KVPool, batch: ForwardBatch) -> ForwardBatch:
    """The batch, on the pool's first requests: every case's pool has handed out the same rows."""
    return replace(batch, req_pool_indices=torch.arange(batch.batch_size, 0, -1, device=pool.device))


@IN_INTERPRETER
def test_padded_requests_look_at_the_sink_alone() -> None:
    pool = build(case_of(VERIFY, (CONTEXT,) * 4))[1]
    for mode, lengths in ((DECODE, 1), (VERIFY, 1 + D), (RAGGED, 1 + D), (EXTEND_V1, 1), (EXTEND_V2, 1)):
        runner = runner_of(buffers_of(pool, 4, [mode])[mode])
        replay(runner, on_requests_of(pool, build(case_of(mode, (150, 140, 130, 120)))[0]))
        got = replay(runner, on_requests_of(pool, build(case_of(mode, (150, 140, 130)))[0]))
        assert got.seq_lens_k[3].item() == lengths
        assert got.block_kv_indices[3, 0].item() == 0


@IN_INTERPRETER
@pytest.mark.parametrize("attention", [MLA, MLA_WITH_OFFSET])
def test_a_draft_step_is_the_multi_step_backends(attention: DraftAttention) -> None:
    """`lab.metadata.speculation.draft_steps` makes the same of all steps at once."""
    batch, pool = build(case_of(DECODE, (60, 97)))
    steps = build_draft_steps(MultiStepDraft(attention, 4, DraftPlan.PER_STEP), batch, pool)
    for number, step in enumerate(steps):
        mode = GraphMode.draft_decode(number)
        drafted = replace(build(case_of(mode, (60, 97)))[0], seq_lens=batch.seq_lens)
        eager = build_mla_decode_metadata(drafted, pool, attention)
        graph = replay(runner_of(buffers_of(pool, 2, [mode], attention)[mode], (2,)), drafted)
        assert isinstance(step.metadata, TRTLLMMLADecodeMetadata)
        for other in (eager, graph):
            assert torch.equal(other.seq_lens_k, step.metadata.seq_lens_k)
            assert torch.equal(other.block_kv_indices, step.metadata.block_kv_indices)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("mode", MODES, ids=name_of)
def test_a_replay_never_synchronises(mode: GraphMode, device: str) -> None:
    batch, pool = build(case_of(mode, (150, 97, 64)), device)
    runner = runner_of(buffers_of(pool, 4, [mode], MLA_WITH_OFFSET)[mode])
    with synchronisation_is_an_error():
        got = replay(runner, batch)
        build_mla_decode_metadata(batch, pool, MLA_WITH_OFFSET)
    assert_replayed(got, batch, pool, MLA_WITH_OFFSET)


# --- end to end ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Attending:
    """A runner whose graphs run one layer's attention by the reference, and the buffer of its query rows."""

    runner: GraphRunner[TRTLLMMLADecodeMetadata]
    query: Tensor

    def replay(self, batch: ForwardBatch, query: Tensor) -> Tensor:
        self.query[: len(query)] = query
        out: Tensor = self.runner.replay(batch)
        return out


def attending(engine: Engine, buffers: MLAGraphMetadata) -> Attending:
    mode, max_batch_size = buffers.mode, len(buffers.block_kv_indices)
    rows = max_batch_size * mode.num_tokens_per_req
    query = torch.zeros(rows, HEADS, RANK + ROPE, dtype=torch.float64)
    out = torch.full((rows, HEADS, RANK), 9.0, dtype=torch.float64)
    padded = torch.zeros(max_batch_size, mode.num_tokens_per_req, HEADS, RANK + ROPE, dtype=torch.float64)

    def body(view: ForwardBatch, metadata: TRTLLMMLADecodeMetadata) -> Callable[[], Tensor]:
        n = view.num_tokens
        return prepare_mla_attention(
            lab.references, view, metadata, LAYER, query[:n], engine.cache, out=out[:n], padded_query=padded
        )

    runner = GraphRunner(
        TRTLLMMLABackend(attention=buffers.attention), mode, engine.pool, (1, 2, 4), body, metadata=buffers
    )
    return Attending(runner, query)


def news_of(mode: GraphMode, count: int, turn: int) -> list[int]:
    if mode not in (EXTEND_V1, RAGGED):
        return [mode.num_tokens_per_req] * count
    return [[3, 1, 4, 2], [1, 3, 2, 2], [4, 4, 4, 4], [2, 2, 2, 2], [1, 4, 1, 4]][turn % 5][:count]


@IN_INTERPRETER
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("mode", "attention"), WITH_ATTENTION, ids=name_of)
def test_attention_over_the_histories(mode: GraphMode, page_size: int, attention: DraftAttention) -> None:
    """Batches come and go: requests are freed, pages reused, sizes padded; each is right whatever the last one left."""
    engine = Engine(page_size, seed=page_size)
    graphs = attending(engine, buffers_of(engine.pool, 4, [mode], attention)[mode])
    turns = ([150, 64, 35, 120], [33, 5, 96, 4], [149, 150], [32], [128, 7, 65], [64, 150, 33, 34])
    for turn, totals in enumerate(turns):
        served, rows = engine.serve(mode, totals, news_of(mode, len(totals), turn), attention=attention)
        out = graphs.replay(served.batch, served.query)
        torch.testing.assert_close(out[: len(served.expected)], served.expected, rtol=1e-12, atol=1e-12)
        if mode is RAGGED:  # rows after the padded requests', which have D each, are nobody's
            captured = graphs.runner.captured[graphs.runner.size_for(len(totals))]
            covered = sum(news_of(mode, len(totals), turn)) + D * (captured.view.batch_size - len(totals))
            assert (out[covered:] == 0).all()
        eager = torch.empty(len(served.expected), HEADS, RANK, dtype=torch.float64)
        prepare_mla_attention(
            lab.references,
            served.batch,
            graphs.runner.eager(served.batch),
            LAYER,
            served.query,
            engine.cache,
            out=eager,
        )()
        assert torch.allclose(eager, out[: len(eager)], rtol=1e-12, atol=1e-12)
        engine.release(rows)


@IN_INTERPRETER
def test_modes_that_share_the_table_do_not_disturb_each_other() -> None:
    engine = Engine()
    graphs = {mode: attending(engine, buffers) for mode, buffers in buffers_of(engine.pool, 4, MODES).items()}
    for turn, mode in enumerate([VERIFY, DECODE, EXTEND_V1, RAGGED, VERIFY, EXTEND_V2, RAGGED, DECODE, EXTEND_V1]):
        totals = [[150, 64, 35, 120], [33, 5, 96]][turn % 2]
        served, rows = engine.serve(mode, totals, news_of(mode, len(totals), turn))
        out = graphs[mode].replay(served.batch, served.query)
        torch.testing.assert_close(out[: len(served.expected)], served.expected, rtol=1e-12, atol=1e-12)
        engine.release(rows)


@IN_INTERPRETER
@pytest.mark.parametrize(("news", "is_right"), [([D, D, D], True), ([3, 1, 4], False), ([2, 2, 2], False)])
def test_rows_as_they_lie_are_right_only_if_all_are_accepted(news: list[int], is_right: bool) -> None:
    """What SGLang 0.5.12 captures for the first draft extend."""
    engine = Engine()
    buffers = buffers_of(engine.pool, 4, [EXTEND_V1], draft_extend=QueryLayout.VIEW)[EXTEND_V1]
    served, _ = engine.serve(EXTEND_V1, [64, 35, 120], news)
    out = attending(engine, buffers).replay(served.batch, served.query)
    assert torch.allclose(out[: len(served.expected)], served.expected, rtol=1e-9) is is_right


@IN_INTERPRETER
def test_a_missed_offset_changes_what_a_draft_step_sees() -> None:
    """The question that MLA_WITH_OFFSET asks: as is, a step does not see its own token."""
    engine, mode = Engine(), GraphMode.draft_decode(1)
    served, _ = engine.serve(mode, [64, 35], [1, 1], attention=MLA_WITH_OFFSET)
    for attention in (MLA, MLA_WITH_OFFSET):
        out = attending(engine, buffers_of(engine.pool, 4, [mode], attention)[mode])
        got = out.replay(served.batch, served.query)[:2]
        assert torch.allclose(got, served.expected, rtol=1e-9) is (attention is MLA_WITH_OFFSET)
