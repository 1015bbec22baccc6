"""The plan stream's contract, what it plans, that no draft reaches it, and on a GPU its events, each shown to be needed."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.kernels.trtllm import causal_mask
from lab.metadata.engine.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.kv_cache import KVLayout
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.plan_stream import (
    FixUp,
    PlannedVerify,
    PlanStart,
    PlanStream,
    VerifyBackend,
    VerifyBuffers,
    _Moment,
    verify_metadata_under,
)
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.buffers import MetadataBuilder
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.speculation.verify_mask import pack_tree_mask
from lab.metadata.speculation.verify_plan import ChainVerify, TreeMaskVerify
from lab.references import trtllm_batch_decode_with_kv_cache
from lab.references.forward_metadata import forward_metadata
from tests.cases import pack_mask, seen_keys
from tests.metadata.batches import assert_live_cells_right

CPU = torch.device("cpu")
PAGE_SIZE = 16
NUM_REQUESTS = 4
CONTEXT_LEN = 48  # `seen_keys` tells up to 50 keys apart
D = 4
# A draft whose tokens 1 and 2 compete, and whose tokens 0 and 3 each follow the last accepted one.
TREE = [-1, 0, 0, -1]


class Scene:
    """Requests with coded K/V in a pool, of which batches see prefixes: what a row attended to can be read off its output."""

    def __init__(self, device: torch.device = CPU, sliding_window: bool = False) -> None:
        pages = NUM_REQUESTS * CONTEXT_LEN // PAGE_SIZE + 1
        self.pool = KVPool(
            num_requests=NUM_REQUESTS,
            max_context_len=CONTEXT_LEN,
            page_size=PAGE_SIZE,
            num_pages=pages,
            swa_num_pages=pages if sliding_window else None,
            device=device,
        )
        self.rows = [self.pool.add_request(CONTEXT_LEN) for _ in range(NUM_REQUESTS)]
        self.cache = self.pool.new_cache(1, 1, torch.float64, KVLayout.HND)
        code = (2.0 ** torch.arange(CONTEXT_LEN, dtype=torch.float64, device=device)).view(-1, 1, 1)
        for row in self.rows:
            self.cache.write(self.pool.slots(row, 0, CONTEXT_LEN), torch.zeros_like(code), code)

    def batch(self, *seq_lens: int, first_request: int = 0, width: int = D) -> ForwardBatch:
        """Consecutive requests with so many accepted tokens each, and `width` draft tokens after them."""
        rows = self.rows[first_request : first_request + len(seq_lens)]
        device = self.pool.device
        slots = [self.pool.slots(row, n, n + width) for row, n in zip(rows, seq_lens, strict=True)]
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            req_pool_indices=torch.tensor(rows, device=device),
            seq_lens=torch.tensor(seq_lens, device=device),
            out_cache_loc=torch.cat(slots),
            num_tokens=width * len(seq_lens),
            spec_info=SpecInfo(num_draft_tokens=width),
        )

    def attend(self, planned: PlannedVerify) -> tuple[Tensor, Tensor]:
        """The reference's output and LSE of all rows, padded ones too."""
        metadata = planned.metadata
        out, lse = trtllm_batch_decode_with_kv_cache(
            torch.zeros(planned.batch.num_tokens, 1, 1, dtype=torch.float64),
            self.cache.as_hnd(),
            None,
            metadata.page_table,
            metadata.cache_seqlens_int32,
            CONTEXT_LEN,
            q_len_per_req=metadata.max_seq_len_q,
            mask=planned.mask,
            out_dtype=torch.float64,
            return_lse=True,
        )
        return out, lse

    def seen(self, planned: PlannedVerify) -> list[set[int]]:
        """The keys that each row saw."""
        return seen_keys(*self.attend(planned))


def chain(scene: Scene, **options: Any) -> ChainVerify:
    return ChainVerify(scene.pool, D, [NUM_REQUESTS, 1, 2], **options)


def tree(scene: Scene, **options: Any) -> TreeMaskVerify:
    return TreeMaskVerify(scene.pool, D, [NUM_REQUESTS, 1, 2], **options)


def no_draft(buffers: VerifyBuffers) -> None:
    """A draft that fills nothing."""


def draft_of(parents: Sequence[Sequence[int]]) -> Callable[[VerifyBuffers], None]:
    """A draft with these trees."""

    def draft(buffers: VerifyBuffers) -> None:
        filled = buffers[0]
        assert filled is not None
        filled[: len(parents)].copy_(torch.tensor(parents))

    return draft


def keys_of_a_tree(seq_len: int, parents: Sequence[int]) -> list[set[int]]:
    """What each draft token of one request sees: the accepted tokens, its ancestors, itself."""
    return [set(range(seq_len)) | {seq_len + each for each in ancestors(parents, j)} for j in range(len(parents))]


def ancestors(parents: Sequence[int], token: int) -> set[int]:
    """One link after the other, the token itself included."""
    found = set()
    while 0 <= token < len(parents):
        found.add(token)
        token = parents[token]
    return found


# --- the contract -----------------------------------------------------------------------------------------------------


class Recorder(VerifyBackend):
    """Plans nothing, and lists what ran."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @property
    def device(self) -> torch.device:
        return CPU

    def check(self, batch: ForwardBatch) -> None:
        self.log.append("check")

    def plan(self, batch: ForwardBatch) -> PlannedVerify:
        self.log.append("plan")
        return PlannedVerify(batch, metadata=None)  # type: ignore[arg-type]


class SaysNothing(Recorder):
    """As a backend that was written before anybody asked."""


class NeedsNothing(Recorder):
    fix_up = FixUp.NONE


class NeedsAFixUp(Recorder):
    fix_up = FixUp.AFTER_DRAFT

    def update_verify_buffers_to_fill_after_draft(self, planned: PlannedVerify) -> None:
        self.log.append("fix-up")


class NeedsAFixUpAndHasNone(Recorder):
    fix_up = FixUp.AFTER_DRAFT


class NeedsNothingAndHasOne(NeedsAFixUp):
    fix_up = FixUp.NONE


def iterate(backend: Recorder) -> None:
    """All that a worker does with a backend."""
    planner = PlanStream(backend)
    log = backend.log
    planner.run(Scene().batch(20), lambda buffers: log.append("draft"), lambda planned: log.append("verify"))


@pytest.mark.parametrize(
    ("backend", "error", "message"),
    [
        (SaysNothing, NotImplementedError, "SaysNothing does not say whether what it plans depends on the draft"),
        (
            NeedsAFixUpAndHasNone,
            NotImplementedError,
            "NeedsAFixUpAndHasNone has fix_up=FixUp.AFTER_DRAFT but no update_",
        ),
        (NeedsNothingAndHasOne, ValueError, "NeedsNothingAndHasOne has fix_up=FixUp.NONE, so its update_"),
    ],
)
def test_a_backend_that_breaks_the_contract_runs_nothing(
    backend: type[Recorder], error: type[Exception], message: str
) -> None:
    broken = backend()
    with pytest.raises(error, match=message):
        iterate(broken)
    assert broken.log == []


@pytest.mark.parametrize(
    ("backend", "order"),
    [
        (NeedsNothing, ["check", "draft", "plan", "verify"]),
        (NeedsAFixUp, ["check", "draft", "plan", "fix-up", "verify"]),
    ],
)
def test_the_order_of_an_iteration(backend: type[Recorder], order: list[str]) -> None:
    whole = backend()
    iterate(whole)
    assert whole.log == order


def test_the_base_class_does_nothing_only_where_that_was_said() -> None:
    planned = NeedsNothing().plan(Scene().batch(20))
    NeedsNothing().update_verify_buffers_to_fill_after_draft(planned)
    with pytest.raises(NotImplementedError, match="SaysNothing has fix_up=None"):
        SaysNothing().update_verify_buffers_to_fill_after_draft(planned)
    assert list(NeedsNothing().get_verify_buffers_to_fill_after_draft()) == [None, None]


def decode_batch(scene: Scene) -> ForwardBatch:
    rows = torch.tensor(scene.rows[:1])
    return ForwardBatch(ForwardMode.DECODE, rows, torch.tensor([20]), torch.tensor([21]), num_tokens=1)


def batch_elsewhere(scene: Scene) -> ForwardBatch:
    lens = torch.zeros(1, dtype=torch.int64, device="meta")
    return ForwardBatch(ForwardMode.TARGET_VERIFY, lens, lens, lens, num_tokens=D)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (batch_elsewhere, "the batch is on meta but the pool on cpu"),
        (decode_batch, "ForwardMode.DECODE is not verified"),
        (lambda scene: scene.batch(20, 20, 20), r"3 requests exceed every captured size \[1, 2\]"),
        (lambda scene: scene.batch(20, width=3), "3 rows for 1 requests, but this backend verifies 4 rows of each"),
    ],
)
def test_a_batch_that_cannot_be_planned_runs_nothing(batch: Callable[[Scene], ForwardBatch], message: str) -> None:
    scene, log = Scene(), []
    planner = PlanStream(ChainVerify(scene.pool, D, [1, 2]))
    with pytest.raises(ValueError, match=message):
        planner.run(batch(scene), lambda buffers: log.append("draft"), lambda planned: log.append("verify"))
    assert log == []


@pytest.mark.parametrize("sizes", [[], [0, 2]])
@pytest.mark.parametrize("backend", [ChainVerify, TreeMaskVerify])
def test_sizes_that_cannot_be_captured_are_refused(backend: Any, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="must be one size or more, each at least 1"):
        backend(Scene().pool, D, sizes)


def test_the_batch_is_held_until_verify() -> None:
    """Nobody else holds it, and memory given back would be used again while the plan reads it."""
    scene = Scene()
    lengths: list[Any] = []

    def temporary() -> ForwardBatch:
        batch = scene.batch(20)
        lengths.append(weakref.ref(batch.seq_lens))
        return batch

    def verify(planned: PlannedVerify) -> bool:
        gc.collect()
        return lengths[0]() is not None

    assert PlanStream(chain(scene)).run(temporary(), no_draft, verify)
    gc.collect()
    assert lengths[0]() is None


# --- the packed mask of a tree ----------------------------------------------------------------------------------------


def any_forest(d: int, generator: torch.Generator) -> list[int]:
    """Each token follows one drawn before it or none, and then all are renamed, so that parents come in any order."""
    names = torch.randperm(d, generator=generator).tolist()
    parents = [-1] * d
    for j in range(d):
        drawn = int(torch.randint(-1, j, (1,), generator=generator)) if j else -1
        parents[names[j]] = -1 if drawn < 0 else names[drawn]
    return parents


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    batch_size=st.integers(0, 4),
    d=st.sampled_from([1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64]),
    seed=st.integers(0, 2**16),
)
def test_the_mask_of_any_tree(batch_size: int, d: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    forests = [any_forest(d, generator) for _ in range(batch_size)]
    packed = pack_tree_mask(torch.tensor(forests, dtype=torch.int64).view(batch_size, d))
    assert packed.dtype == torch.uint16
    assert packed.shape == (batch_size, d, 2 * -(-d // 32))
    if batch_size:
        masks = [[[k in ancestors(forest, j) for k in range(d)] for j in range(d)] for forest in forests]
        assert torch.equal(packed, pack_mask(masks))


@pytest.mark.parametrize("d", [1, 4, 16, 17, 33, 40])
def test_the_mask_of_a_chain_is_the_causal_one(d: int) -> None:
    assert torch.equal(pack_tree_mask(torch.arange(-1, d - 1).repeat(2, 1)), causal_mask(2, d, CPU))


def test_the_mask_is_written_in_place() -> None:
    out = torch.full((1, 4, 2), 0xFFFF, dtype=torch.int32).to(torch.uint16)
    assert pack_tree_mask(torch.tensor([TREE]), out=out) is out
    assert out.tolist() == [[[0b0001, 0], [0b0011, 0], [0b0101, 0], [0b1000, 0]]]


class NoHostRead(TorchDispatchMode):
    """Raises where the host would have to wait for a number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} reads the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("builder", list(MetadataBuilder))
def test_nothing_is_read_on_the_host(builder: MetadataBuilder) -> None:
    scene = Scene()
    backend, batch = tree(scene, attention=TRTLLMMHABackend(builder=builder)), scene.batch(20, 21, 22)
    with NoHostRead():
        planned = PlanStream(backend).run(batch, no_draft, lambda planned: planned)
    assert planned.metadata.cache_seqlens_int32[:3].tolist() == [24, 25, 26]
    with NoHostRead(), pytest.raises(AssertionError, match="reads the device"):
        planned.metadata.cache_seqlens_int32[0].item()


# --- what is planned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sliding_window", [False, True])
@pytest.mark.parametrize("builder", list(MetadataBuilder))
def test_planned_metadata_are_right_whatever_was_planned_before(builder: MetadataBuilder, sliding_window: bool) -> None:
    scene = Scene(sliding_window=sliding_window)
    planner = PlanStream(chain(scene, attention=TRTLLMMHABackend(builder=builder)))
    for batch in (scene.batch(44, 31, 30, 29), scene.batch(16, 15), scene.batch(12, 13, 1, first_request=1)):
        planned = planner.run(batch, no_draft, lambda planned: planned)
        assert planned.batch.batch_size == planner.backend.planned(batch.batch_size).batch.batch_size
        assert planned.batch.seq_lens[: batch.batch_size].tolist() == batch.seq_lens.tolist()
        assert planned.batch.seq_lens[batch.batch_size :].tolist() == [1] * (
            planned.batch.batch_size - batch.batch_size
        )
        assert_live_cells_right(planned.metadata, forward_metadata(planned.batch, scene.pool))


def test_mla_chains_are_planned_too() -> None:
    """Lengths, and the pages of the largest captured size, padded requests on the sink."""
    pool = KVPool(num_requests=3, max_context_len=96, page_size=32, num_pages=10)
    rows = [pool.add_request(96) for _ in range(3)]
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor([30, 60, 90]),
        out_cache_loc=torch.cat([pool.slots(row, n, n + D) for row, n in zip(rows, (30, 60, 90), strict=True)]),
        num_tokens=3 * D,
        spec_info=SpecInfo(num_draft_tokens=D),
    )
    planned = PlanStream(ChainVerify(pool, D, [4], TRTLLMMLABackend())).run(batch, no_draft, lambda planned: planned)
    assert planned.metadata.seq_lens_k.tolist() == [34, 64, 94, 1 + D]
    expected = [row[:n] for row, n in zip((pool.req_to_token[rows, ::32] // 32).tolist(), (2, 2, 3), strict=True)]
    assert [row[:n] for row, n in zip(planned.metadata.block_kv_indices.tolist(), (2, 2, 3), strict=False)] == expected
    assert planned.metadata.block_kv_indices[3, 0] == 0


def test_a_chain_sees_what_is_before_it() -> None:
    scene = Scene()
    lens = (12, 13, 44)
    seen = PlanStream(chain(scene)).run(scene.batch(*lens), no_draft, scene.seen)
    assert seen[: 3 * D] == [set(range(n + j + 1)) for n in lens for j in range(D)]


FORESTS = [TREE, [-1, 0, 1, 2], [3, 0, -1, 2]]


def test_a_tree_sees_its_ancestors() -> None:
    scene = Scene()
    lens = (12, 13, 44)
    planner = PlanStream(tree(scene))
    for forests in (FORESTS, FORESTS[::-1]):
        seen = planner.run(scene.batch(*lens), draft_of(forests), scene.seen)
        expected = [keys for n, forest in zip(lens, forests, strict=True) for keys in keys_of_a_tree(n, forest)]
        assert seen[: 3 * D] == expected


def test_a_padded_request_keeps_its_chain() -> None:
    scene = Scene()
    planned = PlanStream(tree(scene)).run(scene.batch(12, 13, 44), draft_of(FORESTS), lambda planned: planned)
    assert planned.mask is not None
    assert torch.equal(planned.mask[3:], causal_mask(1, D, CPU))


class ForgetsTheFixUp(PlanStream):
    def _fix_up(self, planned: PlannedVerify) -> None:
        pass


def test_a_fix_up_that_is_forgotten_shows() -> None:
    scene = Scene()
    seen = ForgetsTheFixUp(tree(scene)).run(scene.batch(12), draft_of([TREE]), scene.seen)
    assert seen == keys_of_a_tree(12, [-1, 0, 1, 2])  # the chain that was there before
    assert seen != keys_of_a_tree(12, TREE)


# --- no draft reaches it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RandomDraft:
    """Tokens, positions and trees; it writes K/V of its tokens as a draft model does, and fills what it is handed."""

    scene: Scene
    batch: ForwardBatch
    seed: int

    def __call__(self, buffers: VerifyBuffers) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        bs = self.batch.batch_size
        tokens = torch.randint(128_000, (bs * D, 1, 1), generator=generator).to(self.scene.pool.device, torch.float64)
        self.scene.cache.write(self.batch.out_cache_loc, torch.zeros_like(tokens), tokens)
        positions = torch.randint(CONTEXT_LEN, (bs, D), generator=generator)
        forests = torch.tensor([any_forest(D, generator) for _ in range(bs)])
        for buffer, contents in zip(buffers, (forests, positions), strict=True):
            if buffer is not None:
                buffer[:bs].copy_(contents)


def planned_under_random_drafts(scene: Scene, backend: VerifyBackend, count: int = 12) -> list[dict[str, Tensor]]:
    batch = scene.batch(12, 28, 44)
    return verify_metadata_under(PlanStream(backend), batch, [RandomDraft(scene, batch, seed) for seed in range(count)])


def differing(planned: Sequence[dict[str, Tensor]]) -> set[str]:
    """Names of tensors that are not the same in all, bit for bit."""
    first = planned[0]
    return {name for each in planned for name in first.keys() | each.keys() if not torch.equal(first[name], each[name])}


@pytest.mark.parametrize("sliding_window", [False, True])
@pytest.mark.parametrize("builder", list(MetadataBuilder))
def test_no_draft_reaches_a_chains_metadata(builder: MetadataBuilder, sliding_window: bool) -> None:
    scene = Scene(sliding_window=sliding_window)
    planned = planned_under_random_drafts(scene, chain(scene, attention=TRTLLMMHABackend(builder=builder)))
    window = {"swa_page_table", "swa_out_cache_loc"} if sliding_window else set()
    assert planned[0].keys() == {"cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "page_table"} | window
    assert differing(planned) == set()


def test_the_drafts_do_reach_the_output() -> None:
    """Without this, drafts that change nothing at all would prove nothing."""
    scene = Scene()
    planner, batch = PlanStream(chain(scene)), scene.batch(12, 28, 44)
    outs = [planner.run(batch, RandomDraft(scene, batch, seed), scene.attend)[0] for seed in range(2)]
    assert not torch.equal(outs[0], outs[1])


def test_of_a_tree_nothing_but_the_mask_depends_on_the_draft() -> None:
    scene = Scene()
    assert differing(planned_under_random_drafts(scene, tree(scene))) == {"mask"}


class LengthsFromPositions(ChainVerify):
    """A backend that counts the keys by the draft's positions, and so depends on it."""

    fix_up = FixUp.AFTER_DRAFT

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.positions = torch.zeros(NUM_REQUESTS, D, dtype=torch.int64)

    def get_verify_buffers_to_fill_after_draft(self) -> VerifyBuffers:
        return [None, self.positions]

    def update_verify_buffers_to_fill_after_draft(self, planned: PlannedVerify) -> None:
        lengths = planned.metadata.cache_seqlens_int32
        lengths.copy_(self.positions[: lengths.shape[0]].amax(dim=1) + 1)


def test_metadata_that_depend_on_the_draft_are_noticed() -> None:
    scene = Scene()
    assert differing(planned_under_random_drafts(scene, LengthsFromPositions(scene.pool, D, [NUM_REQUESTS]))) == {
        "cache_seqlens_int32"
    }


# --- streams and events -----------------------------------------------------------------------------------------------

# About 50 ms on a GPU of 2 GHz: long beside what the host needs to launch an iteration.
LONG_CYCLES = 100_000_000


@dataclass(frozen=True, eq=False)
class Span:
    """When something ran on the GPU."""

    start: torch.cuda.Event
    end: torch.cuda.Event


def timed(launch: Callable[[], Any]) -> tuple[Span, Any]:
    """Launch something between two events on the current stream."""
    span = Span(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))
    span.start.record()
    result = launch()
    span.end.record()
    return span, result


class TimedChain(ChainVerify):
    """Keeps when its last plan ran, which may be made to take long."""

    plan_cycles = 0

    def plan(self, batch: ForwardBatch) -> PlannedVerify:
        def launch() -> PlannedVerify:
            if self.plan_cycles:
                torch.cuda._sleep(self.plan_cycles)
            return super(TimedChain, self).plan(batch)

        self.span, planned = timed(launch)
        return planned


class StartsAtOnce(PlanStream):
    """As SGLang 0.5.13: the plan waits for no input."""

    def _wait_for_start(self, stream: Any, inputs_final: Any) -> None:
        pass


class SkipsTheWaitBeforeVerify(PlanStream):
    def _wait_for_plan(self) -> None:
        pass


class OverwritesWhatVerifyReads(PlanStream):
    def _wait_for_verified(self, stream: Any) -> None:
        pass


def long_draft(buffers: VerifyBuffers) -> None:
    torch.cuda._sleep(LONG_CYCLES)


def handed(planned: PlannedVerify) -> PlannedVerify:
    """A verify pass that copies, when it runs, what it was handed."""
    metadata = type(planned.metadata)(
        **{
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in vars(planned.metadata).items()
        }
    )
    return PlannedVerify(planned.batch, metadata)


def is_right(scene: Scene, planned: PlannedVerify, batch: ForwardBatch) -> bool:
    """The check of all tests below: whether verify was handed the metadata of its own batch."""
    try:
        assert_live_cells_right(planned.metadata, forward_metadata(batch, scene.pool))
    except AssertionError:
        return False
    return True


def warmed_up(planner: PlanStream, scene: Scene) -> PlanStream:
    """After an iteration of another batch, so that kernels are compiled and buffers hold what is wrong now."""
    planner.run(scene.batch(1, 2, first_request=2), no_draft, handed)
    torch.cuda.synchronize()
    return planner


def test_the_check_tells_two_batches_apart() -> None:
    scene = Scene()
    planned = PlanStream(chain(scene)).run(scene.batch(30, 20), no_draft, handed)
    assert is_right(scene, planned, scene.batch(30, 20))
    assert not is_right(scene, planned, scene.batch(1, 2, first_request=2))


class Waits:
    """A stream that lists what it waits for."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.events.append(event)


@pytest.mark.parametrize(
    ("start", "without", "with_it"),
    [
        (PlanStart.IN_LINE, [], ["caller's"]),
        (PlanStart.AFTER_DRAFT, ["draft ended"], ["draft ended", "caller's"]),
        (PlanStart.AFTER_INPUTS, ["inputs final"], ["caller's"]),
    ],
    ids=lambda each: each.name if isinstance(each, PlanStart) else "",
)
def test_every_plan_waits_for_inputs_that_the_caller_says_are_final(
    start: PlanStart, without: list[str], with_it: list[str]
) -> None:
    planner: Any = PlanStream(chain(Scene()), start)
    planner._events = {moment: moment.value for moment in _Moment}
    for given_event, expected in ((None, without), ("caller's", with_it)):
        stream: Any = Waits()
        planner._wait_for_start(stream, given_event)
        assert stream.events == expected


def test_an_event_on_a_cpu_is_refused_before_anything_runs() -> None:
    scene, event = Scene(), "an event"
    log: list[Any] = []
    with pytest.raises(ValueError, match="inputs_final='an event', but nothing waits on a cpu: leave it out"):
        PlanStream(chain(scene)).run(scene.batch(20), log.append, log.append, event)  # type: ignore[arg-type]
    assert log == []


on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs two CUDA streams, and there is no GPU here"),
]


def on_cuda(function: Any) -> Any:
    for mark in on_gpu:
        function = mark(function)
    return function


@pytest.fixture
def scene() -> Scene:
    return Scene(torch.device("cuda"))


def timed_chain(scene: Scene, builder: MetadataBuilder = MetadataBuilder.FUSED) -> TimedChain:
    return TimedChain(scene.pool, D, [2], TRTLLMMHABackend(builder=builder))


@on_cuda
@pytest.mark.parametrize("builder", list(MetadataBuilder))
@pytest.mark.parametrize("start", list(PlanStart))
def test_where_a_plan_runs_beside_a_long_draft(scene: Scene, start: PlanStart, builder: MetadataBuilder) -> None:
    backend = timed_chain(scene, builder)
    planner = warmed_up(PlanStream(backend, start), scene)
    spans: list[Span] = []
    batch = scene.batch(30, 20)
    planned = planner.run(batch, lambda buffers: spans.append(timed(lambda: long_draft(buffers))[0]), handed)
    torch.cuda.synchronize()
    (draft,), plan = spans, backend.span
    assert draft.start.elapsed_time(draft.end) > 10  # ms: the draft was long
    overlaps = plan.end.elapsed_time(draft.end) > 0  # planned before the draft had ended
    assert overlaps == (start is PlanStart.AFTER_INPUTS)
    assert overlaps or draft.end.elapsed_time(plan.start) >= 0
    assert is_right(scene, planned, batch)


@on_cuda
@pytest.mark.parametrize(
    ("planner", "right"), [(PlanStream, True), (SkipsTheWaitBeforeVerify, False)], ids=["waits", "does not wait"]
)
def test_verify_waits_for_the_plan(scene: Scene, planner: type[PlanStream], right: bool) -> None:
    backend = timed_chain(scene)
    ready = warmed_up(planner(backend), scene)
    backend.plan_cycles = LONG_CYCLES
    batch = scene.batch(30, 20)
    planned = ready.run(batch, no_draft, handed)
    torch.cuda.synchronize()
    assert is_right(scene, planned, batch) == right


@on_cuda
@pytest.mark.parametrize(
    ("planner", "right"), [(PlanStream, True), (StartsAtOnce, False)], ids=["waits", "does not wait"]
)
def test_a_plan_waits_for_its_inputs(scene: Scene, planner: type[PlanStream], right: bool) -> None:
    ready = warmed_up(planner(timed_chain(scene)), scene)
    batch, final = scene.batch(1, 1), scene.batch(30, 20)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)  # the verify before, whose acceptance makes the lengths
    batch.seq_lens.copy_(final.seq_lens)
    planned = ready.run(batch, no_draft, handed)
    torch.cuda.synchronize()
    assert is_right(scene, planned, final) == right


@on_cuda
@pytest.mark.parametrize("start", list(PlanStart))
@pytest.mark.parametrize("said", [True, False], ids=["event", "no event"])
def test_every_plan_waits_for_inputs_made_on_another_stream(scene: Scene, start: PlanStart, said: bool) -> None:
    """Nothing on the forward stream waits for them, so without the caller's event the plan reads what was there before."""
    ready = warmed_up(PlanStream(timed_chain(scene), start), scene)
    batch, final = scene.batch(1, 1), scene.batch(30, 20)
    torch.cuda.synchronize()
    other, inputs_final = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(other):
        torch.cuda._sleep(LONG_CYCLES)
        batch.seq_lens.copy_(final.seq_lens)
        inputs_final.record()
    planned = ready.run(batch, no_draft, handed, inputs_final if said else None)
    torch.cuda.synchronize()
    assert is_right(scene, planned, final) == said


@on_cuda
@pytest.mark.parametrize(
    ("planner", "right"), [(PlanStream, True), (OverwritesWhatVerifyReads, False)], ids=["waits", "does not wait"]
)
def test_a_plan_waits_for_the_verify_before(scene: Scene, planner: type[PlanStream], right: bool) -> None:
    """Two batches take turns, and the second's inputs were final before the first was verified."""
    ready = warmed_up(planner(timed_chain(scene)), scene)
    first, second = scene.batch(30, 20), scene.batch(7, 40, first_request=2)
    torch.cuda.synchronize()
    inputs_final = torch.cuda.Event()
    inputs_final.record()

    def long_verify(planned: PlannedVerify) -> PlannedVerify:
        torch.cuda._sleep(LONG_CYCLES)
        return handed(planned)

    read_by_first = ready.run(first, no_draft, long_verify, inputs_final)
    read_by_second = ready.run(second, no_draft, handed, inputs_final)
    torch.cuda.synchronize()
    assert is_right(scene, read_by_first, first) == right
    assert is_right(scene, read_by_second, second)


@on_cuda
@pytest.mark.parametrize(
    ("planner", "right"), [(PlanStream, True), (ForgetsTheFixUp, False)], ids=["fixes up", "forgets it"]
)
def test_a_tree_is_packed_behind_a_long_draft(scene: Scene, planner: type[PlanStream], right: bool) -> None:
    """The draft writes the tree when it ends, long after the plan."""
    ready = warmed_up(planner(tree(scene)), scene)
    parents = torch.tensor([TREE, [3, 0, -1, 2]], device="cuda")

    def draft(buffers: VerifyBuffers) -> None:
        long_draft(buffers)
        assert buffers[0] is not None
        buffers[0][:2].copy_(parents)

    batch = scene.batch(30, 20)
    mask = ready.run(batch, draft, lambda planned: planned.tensors()["mask"].clone())
    torch.cuda.synchronize()
    expected = [[[k in ancestors(forest, j) for k in range(D)] for j in range(D)] for forest in parents.tolist()]
    assert torch.equal(mask.cpu(), pack_mask(expected)) == right


@on_cuda
def test_an_iteration_never_waits_on_the_host(scene: Scene) -> None:
    ready, batch = warmed_up(PlanStream(tree(scene)), scene), scene.batch(30, 20)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ready.run(batch, no_draft, handed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_cuda
@pytest.mark.parametrize("builder", list(MetadataBuilder))
def test_no_draft_reaches_a_chains_metadata_on_a_gpu(scene: Scene, builder: MetadataBuilder) -> None:
    batch = scene.batch(12, 28, 44)
    drafts = [RandomDraft(scene, batch, seed) for seed in range(20)]
    for backend, expected in (
        (chain(scene, attention=TRTLLMMHABackend(builder=builder)), set()),
        (tree(scene, attention=TRTLLMMHABackend(builder=builder)), {"mask"}),
    ):
        assert differing(verify_metadata_under(PlanStream(backend), batch, drafts)) == expected
