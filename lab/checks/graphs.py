"""Judge a forward mode in CUDA graphs: nothing that an earlier replay left behind may reach a result.

Every check is a short story of replays, eager passes and poison over one runner. Whatever was told before, each replay must
give the metadata that `lab.references.forward_metadata` works out and the output that the requests' histories give. A runner
is made by a function, so that a deliberate defect can be put in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.checks.metadata_truth import wrong_metadata
from lab.checks.truth import Rules, Truth, truth_of_requests
from lab.checks.verdicts import Outcome
from lab.metadata.engine.cuda_graph import Body, GraphRunner, MetadataPlace
from lab.metadata.engine.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.engine.graph_inputs import PADDED_SEQ_LEN, GraphMode
from lab.metadata.engine.kv_cache import KVLayout
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import uncounted_tokens
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.calls import AttentionLayer, plan_calls, prepare_attention
from lab.workloads.geometries import geometry

POISONED_LENGTH = 2**30  # beyond every table and pool
HUGE = 1e30  # finite in bf16, and so large that one poisoned value in a product shows
SIZES = (2, 4)
# Largest captured size and one request more, which only an eager pass holds.
NUM_REQUESTS = max(SIZES) + 1


@dataclass(frozen=True)
class GraphCase:
    """One mode in graphs, on what.

    Attributes:
        mode: of the runner.
        place: where the metadata is rebuilt.
        geometry: a name of `lab.workloads.GEOMETRIES`.
        page_size: tokens per page.
        num_pages: of each request's history; lengths go up to this many pages less the draft's tokens.
        sliding_window: a sliding-window layer over its own pool.
        padded_seq_len: see `lab.metadata.engine.graph_inputs.StaticInputs`.
        seed: of everything drawn.
    """

    mode: GraphMode
    place: MetadataPlace = MetadataPlace.IN_GRAPH
    geometry: str = "tiny"
    page_size: int = 16
    num_pages: int = 6
    sliding_window: bool = False
    padded_seq_len: int = PADDED_SEQ_LEN
    seed: int = 0

    @property
    def max_context_len(self) -> int:
        return self.page_size * self.num_pages


RunnerFactory = Callable[[Any, KVPool, Sequence[int], Body], GraphRunner]


def right_runner(case: GraphCase, pool: KVPool, batch_sizes: Sequence[int], body: Body) -> GraphRunner:
    """The runner that is judged; what takes its place has the same arguments."""
    return GraphRunner(TRTLLMMHABackend(), case.mode, pool, batch_sizes, body, case.place, case.padded_seq_len)


class Scene:
    """Requests with whole histories in a pool, of which batches see prefixes, and one runner over them.

    What a batch does not see is the request's own later tokens, other requests' pages, or poison, which the sink holds. This
    one is of MHA; what differs in another backend is a method.
    """

    def __init__(self, case: Any, implementation: Any, device: torch.device, make: RunnerFactory) -> None:
        self.case, self.implementation, self.device = case, implementation, device
        self.generator = torch.Generator(device=device).manual_seed(case.seed)
        pages = NUM_REQUESTS * case.num_pages + 1
        self.pool = KVPool(
            num_requests=NUM_REQUESTS,
            max_context_len=case.max_context_len,
            page_size=case.page_size,
            num_pages=pages,
            swa_num_pages=self._swa_num_pages(pages),
            seed=case.seed,
            device=device,
        )
        self.layer = self._layer()
        self.cache = self._new_cache()
        self.rows = [self.pool.add_request(case.max_context_len) for _ in range(NUM_REQUESTS)]
        self.histories = [self._write_history(row) for row in self.rows]
        heads, head_dim, out_head_dim = self._heads()
        most_rows = max(SIZES) * case.mode.num_tokens_per_req
        self.query = self._randn(most_rows, heads, head_dim)
        self.out = torch.zeros(most_rows, heads, out_head_dim, dtype=self.query.dtype, device=device)
        self.runner = make(case, self.pool, SIZES, self._body)

    def batch(self, *totals: int, first_request: int = 0) -> ForwardBatch:
        """A batch of consecutive requests with so many keys each, its own new tokens counted, rows as the mode has them."""
        mode, n = self.case.mode, len(totals)
        rows = self.rows[first_request : first_request + n]
        widths = self.widths(n)
        extends = mode.extends
        uncounted = 0 if extends else self._uncounted()
        slots = [
            self.pool.slots(row, total - width, total) for row, total, width in zip(rows, totals, widths, strict=True)
        ]
        return ForwardBatch(
            forward_mode=mode.forward_mode,
            req_pool_indices=torch.tensor(rows, device=self.device),
            seq_lens=torch.tensor([total - uncounted for total in totals], device=self.device),
            out_cache_loc=torch.cat(slots),
            num_tokens=sum(widths),
            extend_seq_lens=torch.tensor(widths, device=self.device) if extends else None,
            extend_seq_lens_cpu=widths if extends else None,
            spec_info=self._spec_info(),
        )

    def widths(self, count: int) -> list[int]:
        """Query rows of each request: all alike, but in the first draft extend, where 1 to d tokens were accepted."""
        mode, most = self.case.mode, self.case.mode.num_tokens_per_req
        ragged = mode.extends and not mode.forward_mode.is_draft_extend_v2()
        return [i % most + 1 if ragged else most for i in range(count)]

    def replay(self, batch: ForwardBatch, padding: float = 0.0) -> "Result":
        """Draw the batch's queries, fill the padded rows, replay, and copy what came out."""
        rows = batch.num_tokens
        self.query[:rows].copy_(self._randn(rows, *self.query.shape[1:]))
        self.query[rows:].fill_(padding)
        self.out.fill_(float("nan"))
        self.runner.replay(batch)
        captured = self.runner.captured[self.runner.size_for(batch.batch_size)]
        return Result(self.query[:rows].clone(), self.out[:rows].clone(), captured.metadata, captured.view)

    def eager(self, batch: ForwardBatch) -> "Result":
        """The same pass without a graph, in tensors of its own."""
        metadata = self.runner.eager(batch)
        query = self._randn(batch.num_tokens, *self.query.shape[1:])
        out = torch.full((len(query), *self.out.shape[1:]), float("nan"), dtype=self.out.dtype, device=self.device)
        self._prepare(batch, metadata, query, out)()
        return Result(query, out, metadata)

    def poison(self, value: float) -> None:
        """Fill what must not matter, as the next replay writes it before reading it or does not read it at all.

        That is the sink page of K/V, and of the metadata lengths, boundaries that are no preset, write locations, and all cells
        of the tables, which are pointed at the sink. Kernels' scratch stays as it is.
        """
        self.cache.storage[:, 0].fill_(value)
        buffers = self.runner.metadata.buffers
        buffers.page_table.zero_()
        buffers.cache_seqlens_int32.fill_(POISONED_LENGTH)
        buffers.cu_seqlens_k[1:].fill_(POISONED_LENGTH)
        if self.case.mode.extends:
            buffers.cu_seqlens_q[1:].fill_(POISONED_LENGTH)
        if buffers.swa_page_table is not None:
            buffers.swa_page_table.zero_()
        if buffers.swa_out_cache_loc is not None:
            buffers.swa_out_cache_loc.fill_(POISONED_LENGTH)

    def wrongs(self, batch: ForwardBatch, result: "Result") -> str:
        """What is wrong with a result, or nothing."""
        return (
            self._wrong_metadata(batch, result)
            or (self._wrong_padding(batch, result.metadata, result.view) if result.view is not None else "")
            or self._wrong_output(batch, result)
        )

    def pointers(self) -> dict[str, int]:
        """Addresses of every buffer that a graph was captured with."""
        tensors: dict[str, Any] = {"query": self.query, "out": self.out}
        for number, owner in enumerate((self.runner.inputs, *self._metadata_owners())):
            for name, value in vars(owner).items():
                tensors[name if name not in tensors else f"{name} of {number}"] = value
        return {name: tensor.data_ptr() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}

    def _metadata_owners(self) -> tuple[Any, ...]:
        """Objects whose tensors the graphs read their metadata from."""
        return (self.runner.metadata.buffers,)

    def _wrong_metadata(self, batch: ForwardBatch, result: "Result") -> str:
        return wrong_metadata(batch, self.pool, result.metadata)

    def _body(self, view: ForwardBatch, metadata: Any) -> Callable[[], Tensor]:
        rows = view.num_tokens
        return self._prepare(view, metadata, self.query[:rows], self.out[:rows])

    def _prepare(self, batch: ForwardBatch, metadata: Any, query: Tensor, out: Tensor) -> Callable[[], Tensor]:
        return prepare_attention(
            self.implementation,
            batch,
            metadata,
            self.layer,
            query,
            self.cache,
            max_context_len=self.case.max_context_len,
            out=out,
            plan=plan_calls(batch),
        )

    def _swa_num_pages(self, num_pages: int) -> int | None:
        return num_pages if self.case.sliding_window else None

    def _heads(self) -> tuple[int, int, int]:
        """Query heads, and elements of a query's and of an output's."""
        model = geometry(self.case.geometry)
        return model.num_qo_heads, model.head_dim, model.head_dim

    def _new_cache(self) -> Any:
        model = geometry(self.case.geometry)
        return self.pool.new_cache(
            model.num_kv_heads,
            model.head_dim,
            torch.bfloat16,
            KVLayout.NHD,
            sliding_window=self.case.sliding_window,
        )

    def _layer(self) -> Any:
        model, window = geometry(self.case.geometry), self.case.sliding_window
        sinks = self._randn(model.num_qo_heads).float() if model.has_sinks else None
        return AttentionLayer(
            softmax_scale=model.softmax_scale,
            window_left=model.window_left if window else -1,
            reads_swa_pool=window,
            sinks=sinks,
        )

    def _write_history(self, row: int) -> Any:
        model = geometry(self.case.geometry)
        shape = (self.case.max_context_len, model.num_kv_heads, model.head_dim)
        keys, values = self._randn(*shape), self._randn(*shape)
        slots = self.pool.slots(row, 0, self.case.max_context_len)
        self.cache.write(self.pool.swa_slots(slots) if self.case.sliding_window else slots, keys, values)
        return keys, values

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator).to(torch.bfloat16)

    def _spec_info(self) -> SpecInfo | None:
        mode = self.case.mode
        if mode.forward_mode.is_target_verify():
            return SpecInfo(num_draft_tokens=mode.num_tokens_per_req)
        if mode.extends:
            fixed = mode.num_tokens_per_req if mode.forward_mode.is_draft_extend_v2() else -1
            return SpecInfo(num_tokens_per_req=fixed)
        return None if mode.draft_step is None else SpecInfo(speculative_step_id=mode.draft_step)

    def _uncounted(self) -> int:
        """Tokens of a request that its length does not count."""
        return uncounted_tokens(self.runner.inputs.view(1))

    def _wrong_padding(self, batch: ForwardBatch, metadata: Any, view: ForwardBatch) -> str:
        """What the last replay left in padded rows: the reserved request, padding's length, slots and pages of the sink.

        An engine writes K and V of all rows, so that a stale slot in a padded one would overwrite another request's.
        """
        n, rows, width = batch.batch_size, batch.num_tokens, self.case.mode.num_tokens_per_req
        length = self.case.padded_seq_len + self._uncounted()
        pages = -(-length // self.case.page_size)
        uniform: dict[str, tuple[Tensor | None, int]] = {
            "seq_lens": (view.seq_lens[n:], self.case.padded_seq_len),
            "req_pool_indices": (view.req_pool_indices[n:], 0),
            "out_cache_loc": (view.out_cache_loc[rows:], 0),
            "extend_seq_lens": (None if view.extend_seq_lens is None else view.extend_seq_lens[n:], width),
        }
        uniform |= self._padded_metadata(batch, metadata, length, pages)
        for name, (got, wanted) in uniform.items():
            if got is not None and bool((got != wanted).any()):
                return f"{name} of padded rows is {got.tolist()}, expected {wanted} everywhere"
        return ""

    def _padded_metadata(
        self, batch: ForwardBatch, metadata: Any, length: int, pages: int
    ) -> dict[str, tuple[Tensor | None, int]]:
        """Metadata of padded requests, and what each cell of it must be."""
        n, rows, width = batch.batch_size, batch.num_tokens, self.case.mode.num_tokens_per_req
        uniform: dict[str, tuple[Tensor | None, int]] = {
            "cache_seqlens": (metadata.cache_seqlens_int32[n:], length),
            "steps of cu_seqlens_k": (metadata.cu_seqlens_k[n:].diff(), length),
            "steps of cu_seqlens_q": (metadata.cu_seqlens_q[n:].diff(), width),
            "page_table": (metadata.page_table[n:, :pages], 0),
        }
        if metadata.swa_page_table is not None and metadata.swa_out_cache_loc is not None:
            uniform["swa_page_table"] = (metadata.swa_page_table[n:, :pages], 0)
            uniform["swa_out_cache_loc"] = (metadata.swa_out_cache_loc[rows:], 0)
        return uniform

    def _wrong_output(self, batch: ForwardBatch, result: "Result") -> str:
        if not bool(result.out.isfinite().all()):
            return f"{int((~result.out.isfinite()).any(-1).sum())} output vectors of real rows are not finite"
        comparison = self._truth(batch, result.query).compare(result.out)
        if comparison.passed:
            return ""
        return (
            f"{int(comparison.wrong.sum())} output vectors are wrong, the worst {comparison.worst_ratio:.3g} times what is "
            "allowed"
        )

    def _seen(self, batch: ForwardBatch) -> tuple[list[int], list[int]]:
        """Which requests a batch is of, and the keys of each."""
        uncounted = 0 if self.case.mode.extends else self._uncounted()
        requests = [self.rows.index(row) for row in batch.req_pool_indices.tolist()]
        return requests, [length + uncounted for length in batch.seq_lens.tolist()]

    def _truth(self, batch: ForwardBatch, query: Tensor) -> Truth:
        """Each request's rows from its history alone."""
        requests, totals = self._seen(batch)
        histories = [
            (self.histories[request][0][:total], self.histories[request][1][:total])
            for request, total in zip(requests, totals, strict=True)
        ]
        rules = Rules(
            bmm1_scale=self.layer.softmax_scale,
            bmm2_scale=1.0,
            arithmetic=torch.bfloat16,
            out_dtype=torch.bfloat16,
            window_left=self.layer.window_left,
            sinks=self.layer.sinks,
        )
        return truth_of_requests(query, histories, self.widths(batch.batch_size), rules)


@dataclass(frozen=True, eq=False)
class Result:
    """What one pass was given and gave: real rows only, the metadata it ran on, and of a replay the batch as its graph sees it.

    Metadata and view of a replay are the runner's own, which the next replay writes anew: judge each before it.
    """

    query: Tensor
    out: Tensor
    metadata: Any
    view: ForwardBatch | None = None


# A check tells its story on a scene and returns what is wrong, or nothing.
Check = Callable[[Scene], str]


def _all_right(scene: Scene, *batches: ForwardBatch) -> str:
    """Replay one after another and judge each."""
    for number, batch in enumerate(batches):
        if wrong := scene.wrongs(batch, scene.replay(batch)):
            return f"replay {number}: {wrong}"
    return ""


def _lengths(scene: Scene) -> tuple[int, int, int, int]:
    """Short, at a page's edge, across one, and as long as there is room for."""
    size, width = scene.case.page_size, scene.case.mode.num_tokens_per_req
    return width + 1, 2 * size, 3 * size + 1, scene.case.max_context_len


def eager_equals_replay(scene: Scene) -> str:
    """An eager pass, and a replay of the same batch at a captured size."""
    short, edge, across, longest = _lengths(scene)
    batch = scene.batch(across, short, longest, edge)
    return scene.wrongs(batch, scene.eager(batch)) or _all_right(scene, batch)


def after_a_longer_batch(scene: Scene) -> str:
    """Tables and sums keep a longer batch's tails; random data in later pages would be read with a stale length."""
    short, edge, across, longest = _lengths(scene)
    return _all_right(
        scene, scene.batch(longest, longest, longest, longest), scene.batch(short, edge, short, across, first_request=1)
    )


def a_b_a(scene: Scene) -> str:
    """The order of replays does not matter: the same batch gives the same bits again."""
    short, edge, across, longest = _lengths(scene)
    first, other = scene.batch(edge, across), scene.batch(longest, short, first_request=2)
    state = scene.generator.get_state()
    before = scene.replay(first)
    wrong = scene.wrongs(first, before) or _all_right(scene, other)
    scene.generator.set_state(state)
    again = scene.replay(first)
    if not wrong and not torch.equal(before.out, again.out):
        return f"the same batch gave {int((before.out != again.out).sum())} other elements after another one"
    return wrong or scene.wrongs(first, again)


def two_captured_sizes(scene: Scene) -> str:
    """Sizes alias one storage: replay the small, the large, the small, and a padded large one."""
    short, edge, across, longest = _lengths(scene)
    return _all_right(
        scene,
        scene.batch(edge, short),
        scene.batch(longest, across, short, edge),
        scene.batch(across, longest, first_request=1),
        scene.batch(short, longest, edge, first_request=1),
        scene.batch(longest),
    )


def eager_between_replays(scene: Scene) -> str:
    """An eager pass of more requests than any graph holds allocates and frees; the graph's buffers stay."""
    short, edge, across, longest = _lengths(scene)
    wrong = _all_right(scene, scene.batch(edge, across))
    larger = scene.batch(longest, short, across, edge, longest)
    wrong = wrong or scene.wrongs(larger, scene.eager(larger))
    if scene.device.type == "cuda":
        torch.cuda.empty_cache()
    return wrong or _all_right(scene, scene.batch(longest, short, first_request=2))


def same_buffers(scene: Scene) -> str:
    """No replay moves a buffer."""
    short, edge, across, longest = _lengths(scene)
    before = scene.pointers()
    wrong = _all_right(scene, scene.batch(edge, across), scene.batch(longest, short, edge))
    moved = [name for name, address in scene.pointers().items() if address != before.get(name)]
    return f"{', '.join(moved)} moved after capture" if moved else wrong


def poisoned(scene: Scene) -> str:
    """Finite-huge and NaN before each replay, in the sink, padded query rows, and metadata yet to be written."""
    short, edge, across, longest = _lengths(scene)
    for value in (HUGE, float("nan")):
        for batch in (
            scene.batch(across),
            scene.batch(longest, short, edge),
            scene.batch(edge, longest, across, short),
        ):
            scene.poison(value)
            if wrong := scene.wrongs(batch, scene.replay(batch, padding=value)):
                return f"with {value} around it: {wrong}"
    return ""


def captured_below_q(scene: Scene) -> str:
    """A capture runs on padding's lengths, below a draft extend's rows: it gives no NaN, and a full batch is right after it."""
    short, edge, across, longest = _lengths(scene)
    if not bool(scene.out.isfinite().all()):
        return f"{int((~scene.out.isfinite()).any(-1).sum())} output vectors of the capture itself are not finite"
    return _all_right(scene, scene.batch(short, edge, across, longest))


CHECKS: tuple[Check, ...] = (
    captured_below_q,
    eager_equals_replay,
    after_a_longer_batch,
    a_b_a,
    two_captured_sizes,
    eager_between_replays,
    same_buffers,
    poisoned,
)


@dataclass(frozen=True)
class GraphVerdict:
    """What one check says of one case."""

    check: str
    case: Any
    implementation: str
    device: str
    outcome: Outcome
    reason: str = ""


def judge_graphs(
    implementation: Any,
    case: Any,
    device: torch.device | str | None = None,
    make: RunnerFactory = right_runner,
    checks: Sequence[Check] = CHECKS,
    scene: type[Scene] = Scene,
) -> list[GraphVerdict]:
    """Tell every story on a fresh scene.

    Args:
        implementation: any module or object with FlashInfer's two names.
        case: the mode and what it runs on.
        device: where; a GPU if there is one. On a CPU a capture is simulated.
        make: makes the runner.
        checks: the stories.
        scene: the backend's.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = getattr(implementation, "__name__", type(implementation).__name__)
    verdicts = []
    for check in checks:
        try:
            reason = check(scene(case, implementation, where, make))
            outcome = Outcome.WRONG if reason else Outcome.RIGHT
        except NotImplementedError as error:
            outcome, reason = Outcome.DECLINED, str(error)
        except ValueError as error:  # arguments that a call refuses, and that only a replay can have made so
            outcome, reason = Outcome.FAILED, str(error)
        verdicts.append(GraphVerdict(check.__name__, case, name, str(where), outcome, reason))
    return verdicts
