"""Graph checks: right runners pass all of them, and each is shown to fail for a deliberate defect."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.checks.graphs import (
    CHECKS,
    HUGE,
    POISONED_LENGTH,
    GraphCase,
    GraphVerdict,
    Scene,
    judge_graphs,
    right_runner,
)
from lab.checks.verdicts import Outcome
from lab.kernels import portable
from lab.metadata import ForwardBatch, KVPool, SpecInfo, TRTLLMMHAMetadata
from lab.metadata.engine.cuda_graph import GraphRunner, MetadataPlace
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.mha.backend import TRTLLMMHABackend
from tests.devices import DEVICES

CPU = torch.device("cpu")
WIDTH = 4
MODES = {
    "decode": GraphMode.decode(),
    "draft_decode": GraphMode.draft_decode(1),
    "target_verify": GraphMode.target_verify(WIDTH),
    "draft_extend": GraphMode.draft_extend(WIDTH),
    "draft_extend_v2": GraphMode.draft_extend_v2(SpecInfo(num_tokens_per_req=WIDTH)),
}


def wrong(verdicts: list[GraphVerdict]) -> dict[str, str]:
    return {each.check: each.reason for each in verdicts if each.outcome is not Outcome.RIGHT}


@pytest.mark.parametrize("sliding_window", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("place", list(MetadataPlace), ids=lambda place: place.name.lower())
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_passes_with_the_references(mode: str, place: MetadataPlace, sliding_window: bool) -> None:
    case = GraphCase(MODES[mode], place, sliding_window=sliding_window)
    assert wrong(judge_graphs(references, case, CPU)) == {}


@pytest.mark.parametrize("mode", ["draft_decode", "draft_extend_v2"])
def test_the_portable_kernel_passes(mode: str) -> None:
    assert wrong(judge_graphs(portable, GraphCase(MODES[mode], sliding_window=True), CPU)) == {}


# --- deliberate defects -----------------------------------------------------------------------------------------------


class StaleLengths(GraphRunner):
    """Lengths are copied in once and never again."""

    loaded = 0

    def replay(self, batch: ForwardBatch) -> Any:
        self.loaded += 1
        if self.loaded > 1:
            stale = self.inputs.seq_lens[: batch.batch_size].clone()
            batch = replace(batch, seq_lens=stale)
        return super().replay(batch)


class NoRebuildAfterTheFirst(GraphRunner):
    """Each size's metadata is rebuilt for its first batch alone."""

    def replay(self, batch: ForwardBatch) -> Any:
        size = self.size_for(batch.batch_size)
        output = super().replay(batch)
        self.captured[size] = replace(self.captured[size], rebuild=lambda: None)
        return output


class StrideOfAnotherMode(GraphRunner):
    """Rows are laid out as if each request had one row more."""

    def replay(self, batch: ForwardBatch) -> Any:
        boundaries = self.metadata.buffers.cu_seqlens_q
        stride = self.mode.num_tokens_per_req + 1
        boundaries.copy_(torch.arange(0, len(boundaries) * stride, stride, dtype=torch.int32))
        return super().replay(batch)


class GrownAfterCapture(GraphRunner):
    """The input buffers are made anew, larger, when the first batch comes."""

    grown = False

    def replay(self, batch: ForwardBatch) -> Any:
        if not self.grown:
            self.grown = True
            self.inputs.seq_lens = torch.ones(64, dtype=torch.int64)
        return super().replay(batch)


class EagerTakesTheBuffers(GraphRunner):
    """An eager pass rewrites the static buffers, and the graph's inputs with them."""

    def eager(self, batch: ForwardBatch) -> TRTLLMMHAMetadata:
        metadata = super().eager(batch)
        self.inputs.load = lambda *_: None  # type: ignore[method-assign]
        return metadata


class SizesTakeTheTail(GraphRunner):
    """A small batch is loaded where a larger size has its last rows."""

    def replay(self, batch: ForwardBatch) -> Any:
        if batch.batch_size == 1 or self.size_for(batch.batch_size) == max(self.captured):
            return super().replay(batch)
        flipped = replace(batch, seq_lens=batch.seq_lens.flip(0))
        return super().replay(flipped if self._seen_large() else batch)

    def _seen_large(self) -> bool:
        return bool((self.metadata.buffers.cache_seqlens_int32[2:] > 1).any())


def with_a_copied_table(case: GraphCase, pool: KVPool, sizes: Any, body: Any) -> GraphRunner:
    """The kernel was bound to a copy of the page table."""

    def bound_elsewhere(view: ForwardBatch, metadata: TRTLLMMHAMetadata) -> Callable[[], Any]:
        return body(view, replace(metadata, page_table=metadata.page_table.clone()))

    return right_runner(case, pool, sizes, bound_elsewhere)


def without_the_offset(case: GraphCase, pool: KVPool, sizes: Any, body: Any) -> GraphRunner:
    """Draft tokens are not counted: the graph of another draft step."""
    return GraphRunner(TRTLLMMHABackend(), GraphMode.decode(), pool, sizes, body, case.place)


def padding_not_reset(name: str) -> Callable[..., GraphRunner]:
    """Padded rows keep what an earlier batch left in one input: its fill is missing."""

    def make(case: GraphCase, pool: KVPool, sizes: Any, body: Any) -> GraphRunner:
        made = right_runner(case, pool, sizes, body)
        load, buffer = made.inputs.load, getattr(made.inputs, name)

        def load_without_the_fill(batch: ForwardBatch, batch_size: int) -> None:
            stale = buffer.clone()
            load(batch, batch_size)
            real = batch.out_cache_loc.shape[0] if name == "out_cache_loc" else batch.batch_size
            buffer[real:].copy_(stale[real:])

        made.inputs.load = load_without_the_fill  # type: ignore[method-assign]
        return made

    return make


class KeepsTheTailOfWriteLocations(GraphRunner):
    """Of the sliding window's write locations only the real rows are written."""

    def replay(self, batch: ForwardBatch) -> Any:
        written = self.metadata.buffers.swa_out_cache_loc
        assert written is not None
        stale = written.clone()
        output = super().replay(batch)
        written[batch.num_tokens :].copy_(stale[batch.num_tokens :])
        return output


def runner(kind: type[GraphRunner]) -> Callable[..., GraphRunner]:
    return lambda case, pool, sizes, body: kind(TRTLLMMHABackend(), case.mode, pool, sizes, body, case.place)


def mutant(change: Callable[[dict[str, Any], torch.Tensor], None]) -> Any:
    """The reference, but for what `change` does to its output."""

    def decode(**arguments: Any) -> torch.Tensor:
        out = references.trtllm_batch_decode_with_kv_cache(**arguments)
        change(arguments, out)
        return out

    return SimpleNamespace(trtllm_batch_decode_with_kv_cache=decode)


def nan_without_keys(arguments: dict[str, Any], out: torch.Tensor) -> None:
    """0 / 0 where a row sees no key, as SGLang's draft decode met at capture (#26521)."""
    width = arguments["q_len_per_req"]
    rows = arguments["seq_lens"].repeat_interleave(width)
    offsets = torch.arange(width).repeat(len(arguments["seq_lens"]))
    out[rows - width + offsets < 0] = float("nan")


def padding_times_zero(arguments: dict[str, Any], out: torch.Tensor) -> None:
    """Other requests' rows take part with weight zero, which keeps nothing of a number and all of a NaN."""
    out += 0.0 * arguments["query"].sum()


@dataclass(frozen=True)
class Defect:
    mode: str
    make: Callable[..., GraphRunner] = right_runner
    implementation: Any = references
    place: MetadataPlace = MetadataPlace.BEFORE_REPLAY
    sliding_window: bool = False


DEFECTS = {
    "stale lengths": Defect("target_verify", runner(StaleLengths)),
    "no rebuild after the first": Defect("decode", runner(NoRebuildAfterTheFirst)),
    "a table not rebound": Defect("draft_decode", with_a_copied_table),
    "a stride of another mode": Defect("target_verify", runner(StrideOfAnotherMode)),
    "a buffer grown after capture": Defect("decode", runner(GrownAfterCapture), place=MetadataPlace.IN_GRAPH),
    "an eager pass takes the buffers": Defect("decode", runner(EagerTakesTheBuffers)),
    "sizes do not share their storage": Defect("decode", runner(SizesTakeTheTail)),
    "a missing offset": Defect("draft_decode", without_the_offset),
    "NaN for a row without keys": Defect("draft_extend_v2", implementation=mutant(nan_without_keys)),
    "padding times zero": Defect("draft_extend_v2", implementation=mutant(padding_times_zero)),
    "seq_lens of padding not reset": Defect("decode", padding_not_reset("seq_lens")),
    "req_pool_indices of padding not reset": Defect("decode", padding_not_reset("req_pool_indices")),
    "out_cache_loc of padding not reset": Defect("decode", padding_not_reset("out_cache_loc")),
    "extend_seq_lens of padding not reset": Defect("draft_extend", padding_not_reset("extend_seq_lens")),
    "the tail of write locations kept": Defect("decode", runner(KeepsTheTailOfWriteLocations), sliding_window=True),
}


@pytest.fixture(scope="module")
def caught() -> dict[str, dict[str, str]]:
    """What each check says of each defect."""
    found = {}
    for name, defect in DEFECTS.items():
        case = GraphCase(MODES[defect.mode], defect.place, sliding_window=defect.sliding_window)
        found[name] = wrong(judge_graphs(defect.implementation, case, CPU, defect.make))
    return found


@pytest.mark.parametrize("name", DEFECTS)
def test_every_defect_is_caught(name: str, caught: dict[str, dict[str, str]]) -> None:
    assert caught[name], f"{name}: every check passed"


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_every_check_catches_a_defect(check: str, caught: dict[str, dict[str, str]]) -> None:
    assert any(check in found for found in caught.values())


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("stale lengths", "after_a_longer_batch", "replay 1: cache_seqlens"),
        ("a table not rebound", "captured_below_q", "output vectors"),
        ("a stride of another mode", "captured_below_q", "cu_seqlens_q"),
        ("a buffer grown after capture", "same_buffers", "seq_lens moved after capture"),
        ("an eager pass takes the buffers", "eager_between_replays", "cache_seqlens"),
        ("NaN for a row without keys", "captured_below_q", "of the capture itself are not finite"),
        ("padding times zero", "poisoned", "with nan around it"),
        ("seq_lens of padding not reset", "two_captured_sizes", "replay 3: seq_lens of padded rows is"),
        ("req_pool_indices of padding not reset", "two_captured_sizes", "replay 3: req_pool_indices of padded rows is"),
        ("out_cache_loc of padding not reset", "two_captured_sizes", "replay 3: out_cache_loc of padded rows is"),
        ("extend_seq_lens of padding not reset", "two_captured_sizes", "extend_seq_lens of padded rows is"),
        ("the tail of write locations kept", "poisoned", "swa_out_cache_loc of padded rows is"),
    ],
)
def test_a_check_says_what_is_wrong(name: str, check: str, words: str, caught: dict[str, dict[str, str]]) -> None:
    assert words in caught[name][check]


# --- poison -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", list(MetadataPlace), ids=lambda place: place.name.lower())
@pytest.mark.parametrize("mode", ["decode", "draft_extend", "draft_extend_v2"])
@pytest.mark.parametrize("device", DEVICES)
def test_poison_is_in_all_metadata_that_a_replay_rewrites(device: str, mode: str, place: MetadataPlace) -> None:
    implementation = references if device == "cpu" else portable
    scene = Scene(
        GraphCase(MODES[mode], place, sliding_window=True), implementation, torch.device(device), right_runner
    )
    buffers = scene.runner.metadata.buffers
    preset = buffers.cu_seqlens_q.clone()
    scene.poison(HUGE)
    assert buffers.swa_out_cache_loc is not None
    assert buffers.swa_page_table is not None
    poisoned = [buffers.cache_seqlens_int32, buffers.cu_seqlens_k[1:], buffers.swa_out_cache_loc]
    if scene.case.mode.extends:
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
@pytest.mark.parametrize("name", ["trtllm", "portable"])
def test_real_graphs(name: str, mode: str, place: MetadataPlace, sliding_window: bool) -> None:
    import importlib

    implementation = importlib.import_module(f"lab.kernels.{name}")
    case = GraphCase(MODES[mode], place, "gpt-oss-120b", page_size=64, sliding_window=sliding_window)
    assert wrong(judge_graphs(implementation, case, "cuda")) == {}
