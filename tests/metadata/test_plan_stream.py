"""The plan stream's contract, what it plans, that no draft reaches it, and on a GPU its events, each shown to be needed."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.kernels.trtllm import causal_mask
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.kv_cache import KVLayout
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.metadata import MetadataBuilder
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.speculation.plan_stream import (
    ChainVerify,
    FixUp,
    PlannedVerify,
    PlanStart,
    PlanStream,
    TreeMaskVerify,
    VerifyBackend,
    VerifyBuffers,
    _Moment,
    verify_metadata_under,
)
from lab.metadata.speculation.verify_mask import pack_tree_mask
from lab.references import trtllm_batch_decode_with_kv_cache
from lab.references.forward_metadata import forward_metadata
from lab.workloads.requests import Requests, new_pool
from tests.cases import pack_mask, seen_keys
from tests.devices import DEVICES, ON_GPU, synchronisation_is_an_error
from tests.metadata.batches import (
    Case,
    assert_live_cells_right,
    assert_mla_live_cells_right,
    build,
    mla_truth,
    tensors_of,
)
from tests.metadata.host_reads import ForbidHostReads

CPU = torch.device("cpu")
PAGE_SIZE = 16
NUM_REQUESTS = 4
CONTEXT_LEN = 48  # `seen_keys` tells up to 50 keys apart
D = 4
CHAIN = [-1, 0, 1, 2]
# A draft whose tokens 1 and 2 compete, and whose tokens 0 and 3 each follow the last accepted one.
TREE = [-1, 0, 0, -1]
FORESTS = [TREE, CHAIN, [3, 0, -1, 2]]

each_builder = pytest.mark.parametrize("builder", MetadataBuilder)


class Scene:
    """Requests with coded K/V in a pool, of which batches see prefixes: a row's output says what it attended to."""

    def __init__(self, device: torch.device | str = CPU, sliding_window: bool = False) -> None:
        self.pool = new_pool(
            (CONTEXT_LEN,) * NUM_REQUESTS,
            page_size=PAGE_SIZE,
            max_context_len=CONTEXT_LEN,
            swa_spare_pages=0 if sliding_window else None,
            device=device,
        )
        self.rows = [self.pool.add_request(CONTEXT_LEN) for _ in range(NUM_REQUESTS)]
        self.cache = self.pool.new_cache(1, 1, torch.float64, KVLayout.HND)
        code = (2.0 ** torch.arange(CONTEXT_LEN, dtype=torch.float64, device=device)).view(-1, 1, 1)
        for row in self.rows:
            self.cache.write(self.pool.slots(row, 0, CONTEXT_LEN), torch.zeros_like(code), code)

    def batch(self, *seq_lens: int, first_request: int = 0, width: int = D) -> ForwardBatch:
        """Consecutive requests with these numbers of accepted tokens, and `width` draft tokens after them."""
        rows = tuple(self.rows[first_request : first_request + len(seq_lens)])
        return Requests(self.pool, rows, seq_lens, (width,) * len(seq_lens)).batch(ForwardMode.TARGET_VERIFY)

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


def built_by(builder: MetadataBuilder) -> TRTLLMMHABackend:
    return TRTLLMMHABackend(builder=builder)


def no_draft(buffers: VerifyBuffers) -> None:
    """A draft that fills nothing."""


def draft_of(
    parents: Sequence[Sequence[int]], after: Callable[[VerifyBuffers], None] = no_draft, device: torch.device = CPU
) -> Any:
    """A draft with these trees, which are filled in after some work. The host waits for nothing."""
    drafted = torch.tensor(parents, device=device)

    def draft(buffers: VerifyBuffers) -> None:
        after(buffers)
        filled = buffers[0]
        filled[: len(parents)].copy_(drafted)

    return draft


def planned(planned: PlannedVerify) -> PlannedVerify:
    """A verify pass that returns its plan."""
    return planned


def ancestors(parents: Sequence[int], token: int) -> set[int]:
    """One link after the other, the token itself included."""
    found = set()
    while 0 <= token < len(parents):
        found.add(token)
        token = parents[token]
    return found


def masks_of(forests: Sequence[Sequence[int]]) -> Tensor:
    return pack_mask(
        [[[k in ancestors(each, j) for k in range(len(each))] for j in range(len(each))] for each in forests]
    )


def keys_of_trees(seq_lens: Sequence[int], forests: Sequence[Sequence[int]]) -> list[set[int]]:
    """The keys of each draft token: the accepted tokens, its ancestors, itself."""
    return [
        set(range(n)) | {n + each for each in ancestors(parents, j)}
        for n, parents in zip(seq_lens, forests, strict=True)
        for j in range(len(parents))
    ]


# --- the contract -----------------------------------------------------------------------------------------------------


class Recorder(VerifyBackend):
    """Plans nothing, and lists what ran."""

    device = CPU

    def __init__(self) -> None:
        self.log: list[str] = []

    def check(self, batch: ForwardBatch) -> None:
        self.log.append("check")

    def plan(self, batch: ForwardBatch) -> PlannedVerify:
        self.log.append("plan")
        return PlannedVerify(batch, metadata=None)


def declaring(fix_up: FixUp | None, *, defines: bool = False) -> Recorder:
    """A backend `Declaring` that declares this, and defines the fix-up or not."""
    members: dict[str, Any] = {} if fix_up is None else {"fix_up": fix_up}
    if defines:
        members["update_verify_buffers_to_fill_after_draft"] = lambda self, planned: self.log.append("fix-up")
    made: Recorder = type("Declaring", (Recorder,), members)()
    return made


def iterate(backend: Recorder) -> None:
    """All that a worker does with a backend."""
    planner, log = PlanStream(backend), backend.log
    planner.run(Scene().batch(20), lambda buffers: log.append("draft"), lambda planned: log.append("verify"))


@pytest.mark.parametrize(
    ("backend", "error", "message"),
    [
        (declaring(None), NotImplementedError, "Declaring does not say whether what it plans depends on the draft"),
        (declaring(FixUp.AFTER_DRAFT), NotImplementedError, "has fix_up=FixUp.AFTER_DRAFT but no update_"),
        (declaring(FixUp.NONE, defines=True), ValueError, "Declaring has fix_up=FixUp.NONE, so its update_"),
    ],
)
def test_a_backend_that_breaks_the_contract_runs_nothing(
    backend: Recorder, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        iterate(backend)
    assert backend.log == []


@pytest.mark.parametrize("fix_up", FixUp)
def test_the_order_of_an_iteration(fix_up: FixUp) -> None:
    needs = fix_up is FixUp.AFTER_DRAFT
    backend = declaring(fix_up, defines=needs)
    iterate(backend)
    assert backend.log == ["check", "draft", "plan", *["fix-up"] * needs, "verify"]


def test_the_base_class_does_nothing_only_where_that_was_said() -> None:
    needs_nothing, silent = declaring(FixUp.NONE), declaring(None)
    plan = needs_nothing.plan(Scene().batch(20))
    needs_nothing.update_verify_buffers_to_fill_after_draft(plan)
    with pytest.raises(NotImplementedError, match="Declaring has fix_up=None"):
        silent.update_verify_buffers_to_fill_after_draft(plan)
    assert list(needs_nothing.get_verify_buffers_to_fill_after_draft()) == [None, None]


def decode_batch(scene: Scene) -> ForwardBatch:
    rows = torch.tensor(scene.rows[:1])
    return ForwardBatch(ForwardMode.DECODE, rows, torch.tensor([20]), torch.tensor([21]), num_tokens=1)


def batch_elsewhere(scene: Scene) -> ForwardBatch:
    lens = torch.zeros(1, dtype=torch.int64, device="meta")
    return ForwardBatch(ForwardMode.TARGET_VERIFY, lens, lens, lens, num_tokens=D)


@pytest.mark.parametrize(
    ("batch", "event", "message"),
    [
        (batch_elsewhere, None, "the batch is on meta but the pool on cpu"),
        (decode_batch, None, "ForwardMode.DECODE is not verified"),
        (lambda scene: scene.batch(20, 20, 20), None, r"3 requests exceed every captured size \[1, 2\]"),
        (lambda scene: scene.batch(20, width=3), None, "3 rows for 1 requests, but this backend verifies 4 rows"),
        (lambda scene: scene.batch(20), "an event", "='an event', but nothing waits on a cpu: leave it out"),
    ],
)
def test_what_cannot_be_planned_runs_nothing(batch: Callable[[Scene], ForwardBatch], event: Any, message: str) -> None:
    scene, log = Scene(), []
    planner = PlanStream(ChainVerify(scene.pool, D, [1, 2]))
    with pytest.raises(ValueError, match=message):
        planner.run(batch(scene), log.append, log.append, event)
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
    assert batch_size == 0 or torch.equal(packed, masks_of(forests))


def test_the_mask_is_written_in_place() -> None:
    out = torch.full((1, 4, 2), 0xFFFF, dtype=torch.int32).to(torch.uint16)
    assert pack_tree_mask(torch.tensor([TREE]), out=out) is out
    assert out.tolist() == [[[0b0001, 0], [0b0011, 0], [0b0101, 0], [0b1000, 0]]]


# --- what is planned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sliding_window", [False, True])
@each_builder
def test_planned_metadata_are_right_whatever_was_planned_before(builder: MetadataBuilder, sliding_window: bool) -> None:
    """And the host reads nothing."""
    scene = Scene(sliding_window=sliding_window)
    planner = PlanStream(chain(scene, attention=built_by(builder)))
    sizes = []
    for batch in (scene.batch(44, 31, 30, 29), scene.batch(16, 15), scene.batch(12, 13, 1, first_request=1)):
        with ForbidHostReads():
            plan = planner.run(batch, no_draft, planned)
        sizes.append(plan.batch.batch_size)
        assert plan.batch.seq_lens.tolist() == batch.seq_lens.tolist() + [1] * (sizes[-1] - batch.batch_size)
        assert_live_cells_right(plan.metadata, forward_metadata(plan.batch, scene.pool))
    assert sizes == [4, 2, 4]


def test_mla_chains_are_planned_too() -> None:
    """A padded request is on the sink."""
    batch, pool = build(Case(ForwardMode.TARGET_VERIFY, (34, 64, 94), (), D, page_size=32, sliding_window=False))
    plan = PlanStream(ChainVerify(pool, D, [4], TRTLLMMLABackend())).run(batch, no_draft, planned)
    assert plan.metadata.seq_lens_k.tolist() == [34, 64, 94, 1 + D]
    assert_mla_live_cells_right(plan.metadata, mla_truth(plan.batch, pool, TRTLLMMLABackend().attention))


def test_rows_see_their_ancestors() -> None:
    """Of a chain those before them; of trees whatever was drafted before, and a padded request keeps its chain."""
    scene, lens = Scene(), (12, 13, 44)
    seen = PlanStream(chain(scene)).run(scene.batch(*lens), no_draft, scene.seen)
    assert seen[: 3 * D] == keys_of_trees(lens, [CHAIN] * 3)
    planner = PlanStream(tree(scene))
    for forests in (FORESTS, FORESTS[::-1]):
        plan = planner.run(scene.batch(*lens), draft_of(forests), planned)
        assert scene.seen(plan)[: 3 * D] == keys_of_trees(lens, forests)
        assert torch.equal(plan.mask[3:], causal_mask(1, D, CPU))


def without(method: str) -> type[PlanStream]:
    """A plan stream that leaves one of its steps out."""
    return type(f"Without{method}", (PlanStream,), {method: lambda *_: None})


# --- no draft reaches it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RandomDraft:
    """Tokens, positions and trees; it writes K/V of its tokens as a draft model does, and fills the buffers it gets."""

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


def differing(scene: Scene, backend: VerifyBackend) -> tuple[set[str], set[str]]:
    """Return the names of all planned tensors, and of those that random drafts change in a bit."""
    batch = scene.batch(12, 28, 44)
    first, *others = verify_metadata_under(
        PlanStream(backend), batch, [RandomDraft(scene, batch, seed) for seed in range(12)]
    )
    assert all(each.keys() == first.keys() for each in others)
    return set(first), {name for each in others for name in first if not torch.equal(first[name], each[name])}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sliding_window", [False, True])
@each_builder
def test_no_draft_reaches_the_metadata(builder: MetadataBuilder, sliding_window: bool, device: str) -> None:
    """Of a tree nothing but the mask depends on the draft."""
    scene = Scene(device, sliding_window)
    names = {"cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "page_table"}
    names |= {"swa_page_table", "swa_out_cache_loc"} if sliding_window else set()
    assert differing(scene, chain(scene, attention=built_by(builder))) == (names, set())
    assert differing(scene, tree(scene, attention=built_by(builder))) == (names | {"mask"}, {"mask"})


# --- streams and events -----------------------------------------------------------------------------------------------

# About 50 ms on a GPU of 2 GHz: long compared with what the host needs to launch an iteration.
LONG_CYCLES = 100_000_000


Span = tuple[torch.cuda.Event, torch.cuda.Event]  # the start and the end of what ran on the GPU


def timed(launch: Callable[[], Any]) -> tuple[Span, Any]:
    """Launch something between two events on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = launch()
    end.record()
    return (start, end), result


class TimedChain(ChainVerify):
    """Keeps when its last plan ran, which may be made to take long."""

    plan_cycles = 0

    def plan(self, batch: ForwardBatch) -> PlannedVerify:
        def launch() -> PlannedVerify:
            if self.plan_cycles:
                torch.cuda._sleep(self.plan_cycles)
            return super(TimedChain, self).plan(batch)

        self.span, plan = timed(launch)
        return plan


def long_draft(buffers: VerifyBuffers) -> None:
    torch.cuda._sleep(LONG_CYCLES)


def handed(planned: PlannedVerify) -> PlannedVerify:
    """A verify pass that copies, when it runs, the metadata that it was given."""
    copies = {name: tensor.clone() for name, tensor in tensors_of(planned.metadata).items()}
    return PlannedVerify(planned.batch, replace(planned.metadata, **copies))


def is_right(scene: Scene, planned: PlannedVerify, batch: ForwardBatch) -> bool:
    """Return whether verify was given the metadata of its own batch."""
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


class Waits(list[Any]):
    """A stream that lists what it waits for."""

    wait_event = list.append


@pytest.mark.parametrize(
    ("start", "without", "with_it"),
    [
        (PlanStart.IN_LINE, [], ["caller's"]),
        (PlanStart.AFTER_DRAFT, ["draft ended"], ["draft ended", "caller's"]),
        (PlanStart.AFTER_INPUTS, ["inputs final"], ["caller's"]),
    ],
)
def test_every_plan_waits_for_inputs_that_the_caller_says_are_final(
    start: PlanStart, without: list[str], with_it: list[str]
) -> None:
    planner: Any = PlanStream(chain(Scene()), start)
    planner._events = {moment: moment.value for moment in _Moment}
    for given_event, expected in ((None, without), ("caller's", with_it)):
        stream = Waits()
        planner._wait_for_start(stream, given_event)
        assert stream == expected


on_cuda = pytest.mark.parametrize("scene", [pytest.param("cuda", marks=ON_GPU)], indirect=True)


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param)


def needed(method: str) -> pytest.MarkDecorator:
    """The test is right with the plan stream, and wrong with one that leaves a step out."""
    return pytest.mark.parametrize(
        ("planner", "right"), [(PlanStream, True), (without(method), False)], ids=["with", "without"]
    )


def timed_chain(scene: Scene, builder: MetadataBuilder = MetadataBuilder.FUSED) -> TimedChain:
    return TimedChain(scene.pool, D, [2], built_by(builder))


@on_cuda
@each_builder
@pytest.mark.parametrize("start", PlanStart)
def test_where_a_plan_runs_beside_a_long_draft(scene: Scene, start: PlanStart, builder: MetadataBuilder) -> None:
    backend = timed_chain(scene, builder)
    planner = warmed_up(PlanStream(backend, start), scene)
    spans: list[Span] = []
    batch = scene.batch(30, 20)
    plan = planner.run(batch, lambda buffers: spans.append(timed(lambda: long_draft(buffers))[0]), handed)
    torch.cuda.synchronize()
    ((draft_start, draft_end),), (plan_start, plan_end) = spans, backend.span
    assert draft_start.elapsed_time(draft_end) > 10  # ms: the draft was long
    overlaps = plan_end.elapsed_time(draft_end) > 0  # planned before the draft had ended
    assert overlaps == (start is PlanStart.AFTER_INPUTS)
    assert overlaps or draft_end.elapsed_time(plan_start) >= 0
    assert is_right(scene, plan, batch)


@on_cuda
@needed("_wait_for_plan")
def test_verify_waits_for_the_plan(scene: Scene, planner: type[PlanStream], right: bool) -> None:
    backend = timed_chain(scene)
    ready = warmed_up(planner(backend), scene)
    backend.plan_cycles = LONG_CYCLES
    batch = scene.batch(30, 20)
    plan = ready.run(batch, no_draft, handed)
    torch.cuda.synchronize()
    assert is_right(scene, plan, batch) == right


@on_cuda
@needed("_wait_for_start")  # as SGLang 0.5.13 leaves it out
def test_a_plan_waits_for_its_inputs(scene: Scene, planner: type[PlanStream], right: bool) -> None:
    ready = warmed_up(planner(timed_chain(scene)), scene)
    batch, final = scene.batch(1, 1), scene.batch(30, 20)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)  # the verify before, whose acceptance makes the lengths
    batch.seq_lens.copy_(final.seq_lens)
    plan = ready.run(batch, no_draft, handed)
    torch.cuda.synchronize()
    assert is_right(scene, plan, final) == right


@on_cuda
@pytest.mark.parametrize("start", PlanStart)
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
    plan = ready.run(batch, no_draft, handed, inputs_final if said else None)
    torch.cuda.synchronize()
    assert is_right(scene, plan, final) == said


@on_cuda
@needed("_wait_for_verified")
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
@needed("_fix_up")
def test_a_tree_is_packed_behind_a_long_draft(scene: Scene, planner: type[PlanStream], right: bool) -> None:
    """The draft writes the tree when it ends, long after the plan."""
    ready, forests = warmed_up(planner(tree(scene)), scene), FORESTS[::2]
    draft = draft_of(forests, long_draft, scene.pool.device)
    mask = ready.run(scene.batch(30, 20), draft, lambda planned: planned.tensors()["mask"].clone())
    torch.cuda.synchronize()
    assert torch.equal(mask.cpu(), masks_of(forests)) == right


@on_cuda
def test_an_iteration_never_waits_on_the_host(scene: Scene) -> None:
    ready, batch = warmed_up(PlanStream(tree(scene)), scene), scene.batch(30, 20)
    with synchronisation_is_an_error():
        ready.run(batch, no_draft, handed)
