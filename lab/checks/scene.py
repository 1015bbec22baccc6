"""The scene of a graph story: requests with whole histories in a pool, and one runner of captured graphs over them.

What a batch does not see is the request's own later tokens, other requests' pages, or poison, which the sink holds. After any
replay or eager pass, `Scene.wrongs` holds the metadata to the loops of `lab.references.forward_metadata` and the output to the
requests' histories.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.checks.graph_stage import Stage
from lab.metadata.engine.cuda_graph import Body, GraphRunner
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows, UncountedTokens
from lab.metadata.engine.kv_pool import KVPool
from lab.workloads.inputs.expected import made
from lab.workloads.requests import admit, forward_batch, new_pool

SIZES = (2, 4)  # captured batch sizes
NUM_REQUESTS = max(SIZES) + 1  # one more than the largest captured size: only an eager pass holds them all


@dataclass(frozen=True, eq=False)
class ReplayedPass:
    """A pass's real rows, and the metadata it ran on.

    The metadata and the view of a replay are the runner's own, which the next replay writes anew: judge each before it.

    Attributes:
        query: [num_rows, num_qo_heads, head_dim].
        out: [num_rows, num_qo_heads, out_head_dim].
        metadata: of the backend.
        view: of a replay, the batch as its graph sees it; None of an eager pass.
    """

    query: Tensor
    out: Tensor
    metadata: Any
    view: ForwardBatch | None = None


def right_runner(
    backend: Any, case: Any, pool: KVPool, batch_sizes: Sequence[int], body: Body[Any]
) -> GraphRunner[Any]:
    """Make the runner that is judged; what takes its place has the same arguments."""
    return GraphRunner(backend, case.mode, pool, batch_sizes, body, case.place, case.padded_seq_len)


RunnerFactory = Callable[[Any, Any, KVPool, Sequence[int], Body[Any]], GraphRunner[Any]]


class Scene:
    """Requests in a pool and one runner over them.

    Args:
        case: a `lab.checks.graph_case.GraphCase` or `MLAGraphCase`.
        implementation: an object with the functions that the backend calls.
        device: where; on a CPU a capture is simulated.
        stage: of the case's backend.
        make: makes the runner; a deliberate defect can take the place of the right one.
    """

    def __init__(
        self,
        case: Any,
        implementation: Any,
        device: torch.device,
        stage: type[Stage],
        make: RunnerFactory = right_runner,
    ) -> None:
        self.case, self.device = case, device
        self.worst_ratio = 0.0  # of all outputs: the largest error over its bound
        self.generator = torch.Generator(device=device).manual_seed(case.seed)
        lens, window = (case.max_context_len,) * NUM_REQUESTS, getattr(case, "sliding_window", False)
        self.pool = new_pool(
            lens,
            page_size=case.page_size,
            max_context_len=case.max_context_len,
            swa_spare_pages=0 if window else None,
            virtual_slots=getattr(case, "virtual_slots", False),
            seed=case.seed,
            device=device,
        )
        self.stage = stage(case, implementation, self.pool, self._randn)
        admitted = admit(self.pool, lens, (0,) * NUM_REQUESTS)
        self.rows = admitted.rows
        self.histories = [self.stage.draw_history() for _ in self.rows]
        admitted.write(self.stage.cache, self.histories, sliding_window=window)
        heads, head_dim, out_head_dim = self.stage.heads
        most_rows = max(SIZES) * case.mode.num_tokens_per_req
        self.query = self._randn(most_rows, heads, head_dim)
        self.out = torch.zeros(most_rows, heads, out_head_dim, dtype=self.query.dtype, device=device)
        self.runner = make(self.stage.backend, case, self.pool, SIZES, self._body)

    def batch(self, *totals: int, first_request: int = 0) -> ForwardBatch:
        """A batch of consecutive requests with so many keys each, its own new tokens counted, rows as the mode has them."""
        mode, count = self.case.mode, len(totals)
        rows, widths = self.rows[first_request : first_request + count], self.widths(count)
        new = widths if mode.draft_step is None else [self._uncounted()] * count
        slots = [
            self.pool.slots(row, total - min(width, mode.slots_per_req), total)
            for row, total, width in zip(rows, totals, widths, strict=True)
        ]
        return forward_batch(
            mode.forward_mode,
            torch.tensor(rows, device=self.device),
            torch.tensor([total - tokens for total, tokens in zip(totals, new, strict=True)], device=self.device),
            widths,
            torch.cat(slots),
            draft_step=mode.draft_step,
            num_draft_tokens=mode.num_tokens_per_req,
        )

    def widths(self, count: int) -> list[int]:
        """Query rows of each request: all alike, but where 1 to d tokens were accepted, or are verified."""
        most = self.case.mode.num_tokens_per_req
        ragged = self.case.mode.forward_mode.query_rows in (QueryRows.ACCEPTED, QueryRows.VERIFIED)
        return [i % most + 1 if ragged else most for i in range(count)]

    def replay(self, batch: ForwardBatch, padding: float = 0.0) -> ReplayedPass:
        """Draw the batch's queries, fill the padded rows, replay, and copy what came out."""
        rows = batch.num_tokens
        self.query[:rows].copy_(self._randn(rows, *self.query.shape[1:]))
        self.query[rows:].fill_(padding)
        self.out.fill_(float("nan"))
        self.runner.replay(batch)
        captured = self.runner.captured[self.runner.size_for(batch.batch_size)]
        return ReplayedPass(self.query[:rows].clone(), self.out[:rows].clone(), captured.metadata, captured.view)

    def eager(self, batch: ForwardBatch) -> ReplayedPass:
        """The same pass without a graph, in tensors of its own."""
        metadata = self.runner.eager(batch)
        query = self._randn(batch.num_tokens, *self.query.shape[1:])
        out = torch.full((len(query), *self.out.shape[1:]), float("nan"), dtype=self.out.dtype, device=self.device)
        self.stage.prepare(batch, metadata, query, out)()
        return ReplayedPass(query, out, metadata)

    def poison(self, value: float) -> None:
        """Fill what must not matter, as the next replay writes it before reading it or does not read it at all.

        That is the sink page of the cache, and of the metadata lengths, boundaries that are no preset, write locations, and all
        cells of the tables, which then name the sink. Kernels' scratch stays as it is.
        """
        self.stage.poison(self.runner, value)

    def wrongs(self, batch: ForwardBatch, result: ReplayedPass) -> str:
        """Say in a sentence what is wrong with a pass; empty if nothing is."""
        return (
            self.stage.wrong_metadata(batch, result.metadata, result.view)
            or (self._wrong_padding(batch, result.metadata, result.view) if result.view is not None else "")
            or self._wrong_output(batch, result)
        )

    def pointers(self) -> dict[str, int]:
        """Addresses of every buffer that a graph was captured with."""
        tensors: dict[str, Any] = {"query": self.query, "out": self.out}
        for number, owner in enumerate((self.runner.inputs, *self.stage.metadata_owners(self.runner))):
            for name, value in vars(owner).items():
                tensors[name if name not in tensors else f"{name} of {number}"] = value
        return {name: tensor.data_ptr() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}

    def _body(self, view: ForwardBatch, metadata: Any) -> Callable[[], Tensor]:
        rows = view.num_tokens
        return self.stage.prepare(view, metadata, self.query[:rows], self.out[:rows], captured_rows=len(self.query))

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator).to(torch.bfloat16)

    def _uncounted(self) -> int:
        """Tokens of a request that its length does not count."""
        return self.stage.uncounted(self.runner.inputs.view(1))

    def _wrong_padding(self, batch: ForwardBatch, metadata: Any, view: ForwardBatch) -> str:
        """Say what padded rows hold after a replay but the reserved request, padding's length, and slots and pages of the sink.

        An engine writes K and V of all rows, so that a stale slot in a padded one would overwrite another request's.
        """
        count, rows, width = batch.batch_size, batch.num_tokens, self.case.mode.num_tokens_per_req
        length = self.case.padded_seq_len + self._uncounted()
        uniform: dict[str, tuple[Tensor | None, int]] = {
            "seq_lens": (view.seq_lens[count:], self.case.padded_seq_len),
            "req_pool_indices": (view.req_pool_indices[count:], 0),
            "out_cache_loc": (view.out_cache_loc[rows:], 0),
            "extend_seq_lens": (None if view.extend_seq_lens is None else view.extend_seq_lens[count:], width),
        }
        uniform |= self.stage.padded_metadata(batch, metadata, length, -(-length // self.case.page_size))
        for name, (got, wanted) in uniform.items():
            if got is not None and bool((got != wanted).any()):
                return f"{name} of padded rows is {got.tolist()}, expected {wanted} everywhere"
        return ""

    def _wrong_output(self, batch: ForwardBatch, result: ReplayedPass) -> str:
        if not bool(result.out.isfinite().all()):
            return f"{int((~result.out.isfinite()).any(-1).sum())} output vectors of real rows are not finite"
        widths, counts_rows = (
            self.widths(batch.batch_size),
            self.case.mode.forward_mode.uncounted is UncountedTokens.QUERY_ROWS,
        )
        uncounted = widths if counts_rows else [self._uncounted()] * batch.batch_size
        histories = [self.histories[self.rows.index(row)] for row in batch.req_pool_indices.tolist()]
        totals = [length + new for length, new in zip(batch.seq_lens.tolist(), uncounted, strict=True)]
        truth = made(self.stage.truth(result.query, histories, totals, widths))
        comparison = truth.compare(result.out)
        self.worst_ratio = max(self.worst_ratio, comparison.worst_ratio)
        if comparison.passed:
            return ""
        return (
            f"{int(comparison.faulty.sum())} output vectors are wrong, the worst {comparison.worst_ratio:.3g} times what is "
            "allowed"
        )
