"""MLA's metadata in graphs: buffers of several modes and sizes, what replays leave behind, and attention over histories.

On a CPU a replay makes the captured calls again, on the same buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.metadata import DraftAttention, ForwardBatch, ForwardMode, KVPool, QueryLayout, TRTLLMMLADecodeMetadata
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.mla.metadata import MLAGraphMetadata, build_mla_decode_metadata
from tests.devices import DEVICES, IN_INTERPRETER, ON_GPU, synchronisation_is_an_error
from tests.metadata.batches import Case, assert_mla_live_cells_right, build, graph_case, mla_truth
from tests.metadata.served import HEADS, LAYER, MLA, MLA_WITH_OFFSET, PAGE_SIZES, RANK, REFERENCE, ROPE, Engine, Served

V1, V2 = ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
D = 4
DECODE, VERIFY = GraphMode(ForwardMode.DECODE), GraphMode(ForwardMode.TARGET_VERIFY, D)
RAGGED = GraphMode(ForwardMode.RAGGED_VERIFY, D)
EXTEND_V1, EXTEND_V2 = GraphMode(ForwardMode.DRAFT_EXTEND, D), GraphMode(V2, D)
MODES = [DECODE, GraphMode.draft_decode(0), GraphMode.draft_decode(2), VERIFY, RAGGED, EXTEND_V1, EXTEND_V2]
# Every mode, and the draft steps with the offset besides: other modes ignore it.
WITH_ATTENTION = [(mode, MLA) for mode in MODES] + [(mode, MLA_WITH_OFFSET) for mode in MODES[1:3]]
# Each mode with one page size and one of the places where metadata is rebuilt; attention over histories has the other size.
PLACES = [(32, MetadataPlace.IN_GRAPH), (64, MetadataPlace.BEFORE_REPLAY)]
IN_PLACES = [(*each, *PLACES[i % 2]) for i, each in enumerate(WITH_ATTENTION)]
CONTEXT = 200
DISCOVERY = Case(V1, (6, 92, 173, 37), (1, 2, 3, 4), page_size=32, max_context_len=CONTEXT, sliding_window=False)


def name_of(value: object) -> str | None:
    return f"{value.forward_mode.name}-{value.draft_step}" if isinstance(value, GraphMode) else None


def case_of(mode: GraphMode, totals: tuple[int, ...], page_size: int = 32) -> Case:
    return graph_case(mode, totals, page_size=page_size, max_context_len=CONTEXT, sliding_window=False)


def buffers_of(
    pool: KVPool, max_batch_size: int, modes: list[GraphMode], attention: DraftAttention = MLA, **layout: QueryLayout
) -> dict[GraphMode, MLAGraphMetadata]:
    return TRTLLMMLABackend(None, attention, **layout).new_buffers(modes, pool, max_batch_size)


def runner_of(
    buffers: MLAGraphMetadata, place: Any = MetadataPlace.IN_GRAPH, sizes: tuple[int, ...] = (2, 4), body: Any = None
) -> GraphRunner[TRTLLMMLADecodeMetadata]:
    backend, body = TRTLLMMLABackend(attention=buffers.attention), body or (lambda view, metadata: lambda: None)
    return GraphRunner(backend, buffers.mode, buffers.pool, sizes, body, place, metadata=buffers)


def replay(
    runner: GraphRunner[TRTLLMMLADecodeMetadata], mode: GraphMode, totals: tuple[int, ...]
) -> tuple[ForwardBatch, TRTLLMMLADecodeMetadata]:
    """Replay a batch of the pool's first requests: every case's pool has handed out the same rows."""
    pool = runner.pool
    batch, _ = build(case_of(mode, totals, pool.page_size), str(pool.device))
    batch = replace(batch, req_pool_indices=torch.arange(batch.batch_size, 0, -1, device=pool.device))
    runner.replay(batch)
    return batch, runner.captured[runner.size_for(batch.batch_size)].metadata


def assert_replayed(got: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool, attention: DraftAttention) -> None:
    """The batch's own rows, and what every row of the size must be."""
    bs, rows = batch.batch_size, got.max_seq_len_q
    own = replace(got, block_kv_indices=got.block_kv_indices[:bs], seq_lens_k=got.seq_lens_k[:bs], cu_seqlens_q=None)
    assert_mla_live_cells_right(own, mla_truth(batch, pool, attention, rows))
    assert got.max_seq_len_k == pool.max_context_len
    if not batch.forward_mode.query_rows.in_extend_seq_lens:
        assert got.cu_seqlens_q is got.seq_lens_q is got.sum_seq_lens_q is None
        return
    lens = [*(batch.extend_seq_lens_cpu or ()), *[rows] * (got.batch_size - bs)]
    assert (got.seq_lens_q.dtype, got.seq_lens_q.tolist()) == (torch.int32, lens)
    assert got.cu_seqlens_q.dtype == torch.int32
    assert got.cu_seqlens_q.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)]
    assert got.sum_seq_lens_q == rows * got.batch_size


# --- buffers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_table_starts_as_minus_one_and_is_as_wide_as_the_context(page_size: int) -> None:
    _, pool = build(replace(DISCOVERY, page_size=page_size, max_context_len=4095))
    for modes, blocks in ((MODES[:4], 1), ([VERIFY, EXTEND_V2], 1), ([DECODE, EXTEND_V1], 2)):
        table = buffers_of(pool, 5, modes)[modes[0]].buffers.block_kv_indices
        assert (table.dtype, list(table.shape)) == (torch.int32, [5, blocks * 4096 // page_size])
        assert (table == -1).all()
    as_they_lie = buffers_of(pool, 5, [EXTEND_V1], draft_extend=QueryLayout.VIEW)[EXTEND_V1]
    assert as_they_lie.buffers.block_kv_indices.shape[1] == 4096 // page_size


@IN_INTERPRETER
def test_two_modes_at_one_size_keep_what_is_theirs() -> None:
    """SGLang keeps one entry per size: verification after decode gets decode's, without its own tensors."""
    pool = build(case_of(VERIFY, (60, 97)))[1]
    buffers = buffers_of(pool, 4, MODES)
    runners = {mode: runner_of(buffers[mode]) for mode in MODES}
    kept = {mode: replay(runners[mode], mode, (60, 97))[1] for mode in MODES}
    lengths = {mode: kept[mode].seq_lens_k.tolist() for mode in MODES}
    assert lengths[DECODE] == lengths[VERIFY] == [60, 97]
    assert lengths[GraphMode.draft_decode(2)] == [57, 94]
    assert lengths[EXTEND_V1] == [63, 99]
    assert len({kept[mode].seq_lens_k.data_ptr() for mode in MODES}) == len(MODES)
    assert len({kept[mode].block_kv_indices.data_ptr() for mode in MODES}) == 1


def test_other_sizes_and_pools_are_refused() -> None:
    pool = build(DISCOVERY)[1]
    buffers = buffers_of(pool, 4, [DECODE])
    for size in (0, 5):
        with pytest.raises(ValueError, match=f"batch_size={size} is not 1 to max_batch_size=4"):
            buffers[DECODE].slices(size)
    with pytest.raises(ValueError, match="max_batch_size=0"):
        buffers_of(pool, 0, [DECODE])
    with pytest.raises(ValueError, match="is not MLA"):
        buffers_of(pool, 4, [DECODE], DraftAttention.MHA)
    with pytest.raises(ValueError, match=r"page_size=16: .*pages of"):
        buffers_of(build(replace(DISCOVERY, page_size=16))[1], 4, [DECODE])


# --- replays ------------------------------------------------------------------------------------------------------


@IN_INTERPRETER
@pytest.mark.parametrize(
    ("layout", "seq_lens_k", "rows"),
    [(QueryLayout.VIEW, [6, 92, 173, 37], [4, 4, 4, 4]), (QueryLayout.PADDED, [9, 94, 174, 37], [1, 2, 3, 4])],
)
def test_the_lengths_that_sglang_was_seen_to_make(layout: QueryLayout, seq_lens_k: list[int], rows: list[int]) -> None:
    """Measured on SGLang's own builder: as a view in the graph, and padded in an eager pass. The lab's graph pads too."""
    batch, pool = build(DISCOVERY)
    runner = runner_of(buffers_of(pool, 4, [EXTEND_V1], draft_extend=layout)[EXTEND_V1])
    runner.replay(batch)
    got, eager = runner.captured[4].metadata, build_mla_decode_metadata(batch, pool)
    assert (got.seq_lens_k.tolist(), got.query_layout) == (seq_lens_k, layout)
    assert got.seq_lens_q.tolist() == rows
    assert got.cu_seqlens_q.tolist() == [sum(rows[:i]) for i in range(5)]
    assert (eager.seq_lens_k.tolist(), eager.sum_seq_lens_q, eager.max_seq_len_q) == ([9, 94, 174, 37], 10, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("mode", "attention", "page_size", "place"), IN_PLACES, ids=name_of)
def test_a_replay_is_right_and_leaves_the_rest(
    mode: GraphMode, attention: DraftAttention, page_size: int, place: MetadataPlace, device: str
) -> None:
    """A long batch, shorter ones, fewer requests, and the first again; tails keep what the longest left."""
    pool = build(case_of(mode, (CONTEXT,) * 4, page_size), device)[1]
    buffers = buffers_of(pool, 4, [mode], attention)[mode]
    runner = runner_of(buffers, place)
    # Capture's own requests are padding of one token and no page but the sink's; nothing else is written.
    assert set(buffers.buffers.block_kv_indices.unique().tolist()) == {-1, 0}
    long, short = (CONTEXT, 130, 129, 65), (33, 9, 64, 32)
    left: list[list[int]] = []
    address = buffers.buffers.block_kv_indices.data_ptr()
    for totals in (long, short, long, short[:3], (32,), long, short):
        batch, got = replay(runner, mode, totals)
        assert_replayed(got, batch, pool, attention)
        live = mla_truth(batch, pool, attention, got.max_seq_len_q).block_table
        cells = buffers.buffers.block_kv_indices.tolist()
        for pages, now, before in zip(live, cells, left, strict=False):
            assert now[len(pages) :] == before[len(pages) :], "a tail is as the batches before left it"
        left = cells
        assert buffers.buffers.block_kv_indices.data_ptr() == address
    columns = -(-CONTEXT // page_size)
    assert (got.block_kv_indices[0, 3 * 64 // page_size : columns] > 0).all(), "stale pages of the long batch"
    assert (got.block_kv_indices[:, columns + 1 :] == -1).all(), "never live"


@IN_INTERPRETER
def test_padded_requests_look_at_the_sink_alone() -> None:
    pool = build(case_of(VERIFY, (CONTEXT,) * 4))[1]
    for mode, length in ((DECODE, 1), (VERIFY, 1 + D), (RAGGED, 1 + D), (EXTEND_V1, 1), (EXTEND_V2, 1)):
        runner = runner_of(buffers_of(pool, 4, [mode])[mode])
        replay(runner, mode, (150, 140, 130, 120))
        _, got = replay(runner, mode, (150, 140, 130))
        assert (got.seq_lens_k[3].item(), got.block_kv_indices[3, 0].item()) == (length, 0)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("mode", MODES, ids=name_of)
def test_a_replay_never_synchronises(mode: GraphMode, device: str) -> None:
    batch, pool = build(case_of(mode, (150, 97, 64)), device)
    runner = runner_of(buffers_of(pool, 4, [mode], MLA_WITH_OFFSET)[mode])
    with synchronisation_is_an_error():
        runner.replay(batch)
    assert_replayed(runner.captured[4].metadata, batch, pool, MLA_WITH_OFFSET)


# --- end to end ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Attending:
    """A runner whose graphs run one layer's attention by the reference, and the buffer of its query rows."""

    runner: GraphRunner[TRTLLMMLADecodeMetadata]
    query: Tensor

    def replay(self, served: Served) -> Tensor:
        self.query[: len(served.query)] = served.query
        out: Tensor = self.runner.replay(served.batch)
        return out


def attending(engine: Engine, buffers: MLAGraphMetadata) -> Attending:
    max_batch_size, width = len(buffers.buffers.block_kv_indices), buffers.mode.num_tokens_per_req
    query, out, padded = (
        torch.full((*rows, HEADS, dim), 9.0, dtype=torch.float64)
        for rows, dim in (
            ((max_batch_size * width,), RANK + ROPE),
            ((max_batch_size * width,), RANK),
            ((max_batch_size, width), RANK + ROPE),
        )
    )

    def body(view: ForwardBatch, metadata: TRTLLMMLADecodeMetadata) -> Callable[[], Tensor]:
        n = view.num_tokens
        return REFERENCE.prepare_attention(
            view, metadata, LAYER, query[:n], engine.cache, out=out[:n], padded_query=padded
        )

    return Attending(runner_of(buffers, sizes=(1, 2, 4), body=body), query)


def news_of(mode: GraphMode, count: int, turn: int) -> list[int]:
    if mode not in (EXTEND_V1, RAGGED):
        return [mode.num_tokens_per_req] * count
    return [[3, 1, 4, 2], [1, 3, 2, 2], [4, 4, 4, 4], [2, 2, 2, 2], [1, 4, 1, 4]][turn % 5][:count]


@IN_INTERPRETER
@pytest.mark.parametrize(("mode", "attention", "other_size", "_"), IN_PLACES, ids=name_of)
def test_attention_over_the_histories(mode: GraphMode, attention: DraftAttention, other_size: int, _: object) -> None:
    """Batches come and go: requests are freed, pages reused, sizes padded; each is right whatever the last one left.

    The eager pass too, with and without lengths on the host; its padding rows are nobody's.
    """
    page_size = 96 - other_size
    engine = Engine(page_size, seed=page_size)
    graphs = attending(engine, buffers_of(engine.pool, 4, [mode], attention)[mode])
    turns = ([150, 64, 35, 120], [33, 5, 96, 4], [149, 150], [32], [128, 7, 65], [64, 150, 33, 34])
    for turn, totals in enumerate(turns):
        news = news_of(mode, len(totals), turn)
        served, rows = engine.serve(mode, totals, news, attention=attention, host_lengths=turn % 2 == 0)
        out = graphs.replay(served)
        served.assert_right(out)
        if mode is RAGGED:  # rows after the padded requests', which have D each, are nobody's
            captured = graphs.runner.captured[graphs.runner.size_for(len(totals))]
            covered = sum(news) + D * (captured.view.batch_size - len(totals))
            assert (out[covered:] == 0).all()
        batch, query = served.batch, served.query
        if mode.in_extend_seq_lens:
            batch, query = (
                replace(batch, num_tokens=batch.num_tokens + 3),
                torch.cat((query, query.new_zeros(3, 3, 12))),
            )
        eager, metadata = torch.full_like(query[..., :RANK], 9.0), graphs.runner.eager(batch)
        REFERENCE.prepare_attention(batch, metadata, LAYER, query, engine.cache, out=eager)()
        served.assert_right(eager)
        assert (eager[sum(news) :] == (0.0 if mode is RAGGED else 9.0)).all()
        engine.release(rows)


@IN_INTERPRETER
@pytest.mark.parametrize(("news", "is_right"), [([D, D, D], True), ([3, 1, 4], False), ([2, 2, 2], False)])
def test_rows_as_they_lie_are_right_only_if_all_are_accepted(news: list[int], is_right: bool) -> None:
    """What SGLang 0.5.12 captures for the first draft extend."""
    engine = Engine()
    buffers = buffers_of(engine.pool, 4, [EXTEND_V1], draft_extend=QueryLayout.VIEW)[EXTEND_V1]
    served, _ = engine.serve(EXTEND_V1, [64, 35, 120], news)
    out = attending(engine, buffers).replay(served)
    assert torch.allclose(out[: len(served.expected)], served.expected, rtol=1e-9) is is_right
