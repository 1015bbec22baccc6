"""Replay sequences: right runners pass all of them, and each is shown to fail for a deliberate defect."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from corpus.kernels import kernel
from lab import references
from lab.checks import GraphCase, Level, Outcome, Ranges, ReplaySequence, judge_case
from lab.checks.properties import graph_replays
from lab.checks.properties.check import Check
from lab.checks.properties.graph_replays import judge_sequence
from lab.checks.run.judging import run_case
from lab.kernels import portable
from lab.metadata import ForwardBatch, ForwardMode
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.workloads.graph_case import ReplayCase, graph_modes, vllm_graph_modes
from lab.workloads.inputs.replay_backends import MHAReplayFixture
from lab.workloads.inputs.replay_fixture import HUGE, POISONED_LENGTH, RunnerFactory, right_runner
from tests.checks.small import decoding
from tests.devices import DEVICES, IN_INTERPRETER

CPU = torch.device("cpu")
WIDTH = 4


def name_of(mode: GraphMode) -> str:
    if mode.draft_step is None:
        return mode.forward_mode.name.lower()
    return "frozen_kv_draft" if mode.draft_step == FROZEN_KV_STEP else "draft_decode"


MODES = {name_of(mode): mode for mode in (*graph_modes(WIDTH), GraphMode.draft_decode(FROZEN_KV_STEP))}


SETTINGS = list(itertools.product(MetadataPlace, (False, True)))


def reason(case: ReplayCase, implementation: Any = references, make: RunnerFactory = right_runner) -> str:
    """Say why a case on the CPU is not right; empty if it is."""
    check = Check("S", "", lambda *_: (), lambda run: judge_sequence(run, make))
    judged = run_case(implementation, check, case, CPU, Ranges())
    return "" if judged.outcome is Outcome.RIGHT else "; ".join(judged.wrongs or judged.declines)


def wrong(cases: Iterable[ReplayCase], implementation: Any = references) -> dict[str, str]:
    return {repr(case): why for case in cases if (why := reason(case, implementation))}


def cases_of(level: Level) -> list[GraphCase]:
    interfaces = graph_replays.CHECK.interfaces
    return [case for each in interfaces for case in graph_replays.CHECK.cases(each, Ranges(), level)]


def is_plain(case: GraphCase) -> bool:
    """Return False for the cases that only some modes have."""
    return bool(not case.encoder_only and not case.block_sparse and case.padded_seq_len)


def test_every_sequence_of_every_mode_is_run_in_every_setting_and_in_turn_on_a_real_geometry() -> None:
    cases = [case for case in cases_of(Level.FULL) if is_plain(case)]
    modes = {mode for width in (2, 4, 8) for mode in graph_modes(width)} | {GraphMode.draft_decode(s) for s in (0, 2)}
    modes.add(GraphMode.draft_decode(FROZEN_KV_STEP))
    settings = {
        name: Counter((each.place, each.sliding_window) for each in cases if each.geometry == name)
        for name in ("tiny", "gpt-oss-120b")
    }
    run = {(each.mode, each.sequence) for each in cases if each.geometry == "gpt-oss-120b"}
    assert settings["tiny"] == dict.fromkeys(SETTINGS, len(modes) * len(ReplaySequence))
    assert len(run) == settings["gpt-oss-120b"].total() == len(modes) * len(ReplaySequence)
    assert set(settings["gpt-oss-120b"]) == set(SETTINGS)
    assert len(set(map(repr, cases))) == len(cases)


def test_the_smoke_level_has_each_sequence_of_two_modes_and_alternates_settings() -> None:
    cases = [case for case in cases_of(Level.SMOKE) if is_plain(case)]
    assert Counter(case.sequence for case in cases) == dict.fromkeys(ReplaySequence, 2)
    assert {case.mode for case in cases} == set(MODES.values())
    assert len({(case.place, case.sliding_window) for case in cases}) == 4


@IN_INTERPRETER
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_passes_with_the_references(mode: str) -> None:
    """Every sequence in a setting, in turns, so that the mode meets all four and the sequence all four in four modes."""
    turns = itertools.islice(itertools.cycle(SETTINGS), [*MODES].index(mode) % 4, None)
    cases = [
        GraphCase(MODES[mode], sequence, place, sliding_window=window)
        for sequence, (place, window) in zip(ReplaySequence, turns, strict=False)
    ]
    assert {(case.place, case.sliding_window) for case in cases} == {*SETTINGS}
    assert wrong(cases) == {}


def test_graphs_of_vllm_have_padding_without_keys() -> None:
    found = [case for case in cases_of(Level.FULL) if not case.padded_seq_len and case.geometry == "tiny"]
    assert {case.mode.forward_mode for case in found} == {ForwardMode.DECODE, ForwardMode.DRAFT_EXTEND_V2}
    assert {(case.mode, case.sequence) for case in found} == {
        (mode, sequence) for width in (2, 4, 8) for mode in vllm_graph_modes(width) for sequence in ReplaySequence
    }
    assert any(not case.padded_seq_len for case in cases_of(Level.SMOKE))


@IN_INTERPRETER
@pytest.mark.parametrize("mode", vllm_graph_modes(4), ids=lambda mode: mode.forward_mode.name)
def test_padding_without_keys_changes_no_other_row(mode: GraphMode) -> None:
    sequences = (ReplaySequence.AFTER_A_LONGER_BATCH, ReplaySequence.POISONED)
    assert wrong(GraphCase(mode, sequence, padded_seq_len=0) for sequence in sequences) == {}


def test_a_verification_on_encoder_only_layers_has_its_sequences() -> None:
    found = {level: [case for case in cases_of(level) if case.encoder_only] for level in Level}
    assert len(found[Level.SMOKE]) == 2
    assert {case.sequence for case in found[Level.FULL]} == set(ReplaySequence)
    assert {case.place for case in found[Level.FULL]} == set(MetadataPlace)
    assert {case.mode.forward_mode for case in found[Level.FULL]} == {ForwardMode.TARGET_VERIFY}
    assert len(set(map(repr, found[Level.FULL]))) == len(found[Level.FULL])


def encoder_only(sequence: ReplaySequence, place: MetadataPlace = MetadataPlace.IN_GRAPH) -> GraphCase:
    return GraphCase(MODES["target_verify"], sequence, place, encoder_only=True)


@IN_INTERPRETER
def test_rows_that_see_each_other_pass() -> None:
    places = list(MetadataPlace)
    assert wrong(encoder_only(sequence, places[number % 2]) for number, sequence in enumerate(ReplaySequence)) == {}
    assert wrong([replace(encoder_only(ReplaySequence.A_B_A), num_pages=4)], portable) == {}


@IN_INTERPRETER
def test_rows_of_an_earlier_replay_are_found() -> None:
    """The requests' lengths are rebuilt, and their rows' are not."""
    unexpanded = keeping(lambda made, batch: made.metadata.buffers.encoder_cache_seqlens)
    assert "encoder_cache_seqlens" in reason(encoder_only(ReplaySequence.A_B_A), make=unexpanded)


@IN_INTERPRETER
@pytest.mark.parametrize(
    ("mode", "sequence"),
    [("draft_decode", ReplaySequence.CAPTURED_BELOW_Q), ("draft_extend_v2", ReplaySequence.POISONED)],
)
def test_the_portable_kernel_passes(mode: str, sequence: ReplaySequence) -> None:
    assert wrong([GraphCase(MODES[mode], sequence, num_pages=4, sliding_window=True)], portable) == {}


def test_a_sequence_is_declined_where_the_metadata_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_replays, "no_triton", lambda capability: "set TRITON_INTERPRET=1 first")
    verdict = judge_case(references, "S1", GraphCase(MODES["decode"], ReplaySequence.A_B_A), "cpu")
    assert verdict.outcome is Outcome.DECLINED
    assert verdict.reason == "graphs rebuild their metadata in Triton kernels: set TRITON_INTERPRET=1 first"


# --- deliberate defects -----------------------------------------------------------------------------------------------


# Spoils a replay: the part before `yield`, which gives the batch to replay, runs before the replay, and the rest after it.
Spoil = Callable[[Any, ForwardBatch], Iterator[ForwardBatch]]


def spoilt(spoil: Spoil) -> RunnerFactory:
    """Return a maker of runners that spoil each of their `replays`."""

    class Spoilt(GraphRunner):
        replays = 0

        def replay(self, batch: ForwardBatch) -> Any:
            spoiling = spoil(self, batch)
            output = super().replay(next(spoiling))
            next(spoiling, None)
            self.replays += 1
            return output

    return lambda backend, case, pool, sizes, body: Spoilt(backend, case.mode, pool, sizes, body, case.place)


def stale_lengths(made: Any, batch: ForwardBatch) -> Iterator[ForwardBatch]:
    stale = made.inputs.seq_lens[: batch.batch_size].clone()
    yield replace(batch, seq_lens=stale) if made.replays else batch


def counts_its_row(made: Any, batch: ForwardBatch) -> Iterator[ForwardBatch]:
    """Count a token of a frozen-KV draft, as SGLang's graph would where it is captured as a draft step."""
    yield replace(batch, seq_lens=(batch.seq_lens + 1).clamp(max=made.pool.max_context_len))


def rebuilt_for_the_first_batch(made: Any, batch: ForwardBatch) -> Iterator[ForwardBatch]:
    size = made.size_for(batch.batch_size)
    yield batch
    made.captured[size] = replace(made.captured[size], rebuild=lambda: None)


def stride_of_another_mode(made: Any, batch: ForwardBatch) -> Iterator[ForwardBatch]:
    boundaries = made.metadata.buffers.cu_seqlens_q
    boundaries.copy_(torch.arange(len(boundaries)) * (made.mode.num_tokens_per_req + 1))
    yield batch


def grown_after_capture(made: Any, batch: ForwardBatch) -> Iterator[ForwardBatch]:
    if not made.replays:
        made.inputs.seq_lens = torch.ones(64, dtype=torch.int64)
    yield batch


def sizes_take_the_tail(made: Any, batch: ForwardBatch) -> Iterator[ForwardBatch]:
    """Load a small batch where a larger size has its last rows."""
    is_small = batch.batch_size > 1 and made.size_for(batch.batch_size) < max(made.captured)
    is_after_large = bool((made.metadata.buffers.cache_seqlens_int32[2:] > 1).any())
    yield replace(batch, seq_lens=batch.seq_lens.flip(0)) if is_small and is_after_large else batch


def columns_of_the_first_replay(made: Any, batch: ForwardBatch) -> Iterator[ForwardBatch]:
    """Write the columns of the longest request in the first replay: later ones keep what they held."""
    table = made.metadata.buffers.page_table
    stale = table.clone()
    yield batch
    if not made.replays:
        made.columns = -(-int(batch.seq_lens.max()) // made.pool.page_size)
    table[:, made.columns :].copy_(stale[:, made.columns :])


def keeping(part: Callable[[Any, ForwardBatch], torch.Tensor]) -> RunnerFactory:
    """Return a maker of runners whose replays leave a part of a tensor as it was."""

    def spoil(made: Any, batch: ForwardBatch) -> Iterator[ForwardBatch]:
        kept = part(made, batch)
        stale = kept.clone()
        yield batch
        kept.copy_(stale)

    return spoilt(spoil)


def changed(change: Callable[[Any], None]) -> RunnerFactory:
    """Return a maker of right runners that are changed after their capture."""

    def make(*given: Any) -> GraphRunner:
        made = right_runner(*given)
        change(made)
        return made

    return make


def an_eager_pass_takes_the_buffers(made: Any) -> None:
    eager = made.eager

    def taking(batch: ForwardBatch) -> Any:
        made.inputs.load = lambda *_: None
        return eager(batch)

    made.eager = taking


def with_a_copied_table(*given: Any) -> GraphRunner:
    *others, body = given
    return right_runner(
        *others, lambda view, metadata: body(view, replace(metadata, page_table=metadata.page_table.clone()))
    )


def without_the_offset(backend: Any, case: GraphCase, *given: Any) -> GraphRunner:
    """Draft tokens are not counted: the graph of another draft step."""
    return GraphRunner(backend, GraphMode(ForwardMode.DECODE), *given, case.place)


def padding_not_reset(name: str) -> RunnerFactory:
    """Padded rows keep what an earlier batch left in one input: its fill is missing."""

    def change(made: Any) -> None:
        load, buffer = made.inputs.load, getattr(made.inputs, name)

        def load_without_the_fill(batch: ForwardBatch, batch_size: int) -> None:
            stale = buffer.clone()
            load(batch, batch_size)
            real = batch.out_cache_loc.shape[0] if name == "out_cache_loc" else batch.batch_size
            buffer[real:].copy_(stale[real:])

        made.inputs.load = load_without_the_fill

    return changed(change)


BELOW_Q, ABA, SIZES = ReplaySequence.CAPTURED_BELOW_Q, ReplaySequence.A_B_A, ReplaySequence.TWO_CAPTURED_SIZES
LONGER, EAGER = ReplaySequence.AFTER_A_LONGER_BATCH, ReplaySequence.EAGER_EQUALS_REPLAY
SAME, BETWEEN = ReplaySequence.SAME_BUFFERS, ReplaySequence.EAGER_BETWEEN_REPLAYS
# By name: the mode, a wrong runner, and what each of some sequences says of it.
DEFECTS: dict[str, tuple[str, RunnerFactory, dict[ReplaySequence, str]]] = {
    "stale lengths": (
        "target_verify",
        spoilt(stale_lengths),
        {LONGER: "replay 1: cache_seqlens", ABA: "cache_seqlens"},
    ),
    "no rebuild after the first": ("decode", spoilt(rebuilt_for_the_first_batch), {ABA: "cache_seqlens"}),
    "a table not rebound": ("draft_decode", with_a_copied_table, dict.fromkeys((BELOW_Q, EAGER), "output vectors")),
    "a stride of another mode": ("target_verify", spoilt(stride_of_another_mode), {BELOW_Q: "cu_seqlens_q"}),
    "a buffer grown after capture": ("decode", spoilt(grown_after_capture), {SAME: "seq_lens moved after capture"}),
    "an eager pass takes the buffers": ("decode", changed(an_eager_pass_takes_the_buffers), {BETWEEN: "cache_seqlens"}),
    "sizes do not share their storage": ("decode", spoilt(sizes_take_the_tail), {SIZES: "replay 2"}),
    "columns frozen at the first replay": (
        "decode",
        spoilt(columns_of_the_first_replay),
        {ABA: "page_table", SIZES: "replay 1: page_table", SAME: "page_table"},
    ),
    "an offset too many": ("frozen_kv_draft", spoilt(counts_its_row), {BELOW_Q: "cache_seqlens"}),
    "a missing offset": ("draft_decode", without_the_offset, {BELOW_Q: ""}),
    **{
        f"{name} of padding not reset": (mode, padding_not_reset(name), {SIZES: f"{name} of padded rows is"})
        for name, mode in (
            *((name, "decode") for name in ("seq_lens", "req_pool_indices", "out_cache_loc")),
            ("extend_seq_lens", "draft_extend"),
        )
    },
    "the tail of write locations kept": (
        "decode",
        keeping(lambda made, batch: made.metadata.buffers.swa_out_cache_loc[batch.num_tokens :]),
        {ReplaySequence.POISONED: "swa_out_cache_loc of padded rows is"},
    ),
}
WINDOW: dict[str, Any] = {"sliding_window": True}
# Of defects that other cases do not show.
SETTINGS_OF: dict[str, dict[str, Any]] = {
    "a buffer grown after capture": {"place": MetadataPlace.IN_GRAPH},
    "an offset too many": WINDOW,
    "the tail of write locations kept": WINDOW,
}


@IN_INTERPRETER
@pytest.mark.parametrize(
    ("name", "sequence"), [(name, sequence) for name, (_, _, found) in DEFECTS.items() for sequence in found]
)
def test_a_defect_is_found_and_the_sequence_says_what_is_wrong(name: str, sequence: ReplaySequence) -> None:
    mode, make, found = DEFECTS[name]
    settings = {"place": MetadataPlace.BEFORE_REPLAY} | SETTINGS_OF.get(name, {})
    why = reason(GraphCase(MODES[mode], sequence, **settings), make=make)
    assert why
    assert found[sequence] in why


@IN_INTERPRETER
def test_what_is_frozen_at_the_first_replay_shows_where_a_later_one_is_longer() -> None:
    shrinking = GraphCase(MODES["decode"], LONGER, MetadataPlace.BEFORE_REPLAY)
    assert reason(shrinking, make=spoilt(columns_of_the_first_replay)) == ""


def test_every_sequence_finds_a_defect() -> None:
    assert {sequence for _, _, found in DEFECTS.values() for sequence in found} == set(ReplaySequence)


@IN_INTERPRETER
def test_other_bits_of_the_same_batch_are_found() -> None:
    calls: list[Any] = []

    def decode(**arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        out = references.trtllm_batch_decode_with_kv_cache(**arguments)
        out.view(torch.int16)[0, 0, 0] ^= len(calls) // 2 % 2  # the last bit, which every bound allows
        return out

    why = reason(GraphCase(MODES["decode"], ABA), decoding(decode))
    assert why == "the same batch gave 1 other elements after another one"


def test_a_row_without_keys_that_is_nan_shows_at_the_capture() -> None:
    """0 / 0 where a row sees no key, as SGLang's draft decode met at capture (#26521)."""

    def decode(**arguments: Any) -> torch.Tensor:
        out = references.trtllm_batch_decode_with_kv_cache(**arguments)
        width = arguments["q_len_per_req"]
        rows = arguments["seq_lens"].repeat_interleave(width)
        offsets = torch.arange(width).repeat(len(arguments["seq_lens"]))
        out[rows - width + offsets < 0] = float("nan")
        return out

    why = reason(GraphCase(MODES["draft_extend_v2"], BELOW_Q), decoding(decode))
    assert "of the capture itself are not finite" in why


def test_padded_rows_that_take_part_with_weight_zero_show_when_poisoned() -> None:
    mode = MODES["draft_extend_v2"]
    assert "with nan around it" in reason(
        GraphCase(mode, ReplaySequence.POISONED), kernel("other_rows_times_zero").implementation()
    )


# --- poison -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", list(MetadataPlace), ids=lambda place: place.name.lower())
@pytest.mark.parametrize("mode", ["decode", "draft_extend", "draft_extend_v2"])
@pytest.mark.parametrize("device", DEVICES)
def test_poison_is_in_all_metadata_that_a_replay_rewrites(device: str, mode: str, place: MetadataPlace) -> None:
    implementation = references if device == "cpu" else portable
    case = GraphCase(MODES[mode], ReplaySequence.POISONED, place, sliding_window=True)
    fixture = MHAReplayFixture(case, implementation, torch.device(device))
    buffers = fixture.runner.metadata.buffers
    preset = buffers.cu_seqlens_q.clone()
    fixture.poison(HUGE)
    assert buffers.swa_out_cache_loc is not None
    assert buffers.swa_page_table is not None
    poisoned = [buffers.cache_seqlens_int32, buffers.cu_seqlens_k[1:], buffers.swa_out_cache_loc]
    if fixture.case.mode.in_extend_seq_lens:
        poisoned.append(buffers.cu_seqlens_q[1:])
    else:
        assert torch.equal(buffers.cu_seqlens_q, preset)
    assert all(bool((each == POISONED_LENGTH).all()) for each in poisoned)
    assert not bool(buffers.page_table.any() or buffers.swa_page_table.any())


# --- real graphs ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs, and there is no GPU here")
@pytest.mark.parametrize("sliding_window", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("place", list(MetadataPlace), ids=lambda place: place.name.lower())
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["lab.kernels.trtllm", "lab.kernels.portable"])
def test_real_graphs(name: str, mode: str, place: MetadataPlace, sliding_window: bool) -> None:
    for sequence in ReplaySequence:
        case = GraphCase(MODES[mode], sequence, place, 64, geometry="gpt-oss-120b", sliding_window=sliding_window)
        verdict = judge_case(name, "S1", case, "cuda")
        if name == "lab.kernels.trtllm" and mode == "ragged_verify" and torch.cuda.get_device_capability() == (9, 0):
            assert verdict.outcome is Outcome.DECLINED, verdict
            assert "XQA" in verdict.reason
        else:
            assert verdict.outcome is Outcome.RIGHT, verdict
