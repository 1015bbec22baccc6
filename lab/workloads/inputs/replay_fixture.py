"""A test fixture for CUDA graphs: a K/V pool with requests and their tokens, one attention layer, and a runner of graphs. A
batch must not see later tokens, pages of other requests, or page 0, the sink to which padding rows write.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.metadata.engine.backend import GraphMetadata
from lab.metadata.engine.cuda_graph import Body, GraphRunner
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import UncountedTokens
from lab.metadata.engine.kv_cache import PagedKVCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import uncounted_tokens
from lab.metadata.mla.dsv4 import DSV4Cache
from lab.references.errors import Truth
from lab.workloads.graph_case import ReplayCase
from lab.workloads.requests import History, admit, forward_batch, new_pool

SIZES = (2, 4)  # captured batch sizes
NUM_REQUESTS = max(SIZES) + 1  # one more than the largest captured size: only an eager pass can have all requests
POISONED_LENGTH = 2**30  # beyond every table and pool
HUGE = 1e30  # finite in bf16, and so large that one poisoned value in a product shows
DTYPE = torch.bfloat16  # dtype of query, output and cache

Cells = dict[str, tuple[Tensor | None, int]]  # by name: a tensor, and the value that each of its cells must have


@dataclass(frozen=True, eq=False)
class ReplayedPass:
    """The query, output and metadata of one forward pass, without padding rows. The next replay overwrites the metadata."""

    query: Tensor  #: [num_rows, num_qo_heads, head_dim]
    out: Tensor  #: [num_rows, num_qo_heads, out_head_dim]
    metadata: Any  #: the backend's metadata
    view: ForwardBatch | None = None  #: the batch that the replayed graph reads; None for an eager pass


def right_runner(
    backend: Any, case: ReplayCase, pool: KVPool, batch_sizes: Sequence[int], body: Body[Any]
) -> GraphRunner[Any]:
    """Return the lab's own `GraphRunner`. Tests pass functions that return deliberately wrong runners instead."""
    return GraphRunner(backend, case.mode, pool, batch_sizes, body, case.place, case.padded_seq_len)


RunnerFactory = Callable[[Any, Any, KVPool, Sequence[int], Body[Any]], GraphRunner[Any]]


class ReplayFixture:
    """Runs CUDA graph replays and eager passes of one layer, and checks them. On a CPU the graphs are simulated."""

    layer: Any
    cache: Any
    tables: tuple[str, ...]  # names of the metadata's page tables

    def __init__(
        self, case: Any, implementation: Any, device: torch.device, make: RunnerFactory = right_runner
    ) -> None:
        self.case, self.device = case, device
        self.worst_ratio = 0.0  # the largest error over bound of all outputs
        self.generator = torch.Generator(device=device).manual_seed(case.seed)
        lens = (case.max_context_len,) * NUM_REQUESTS
        self.pool = new_pool(
            lens,
            page_size=case.page_size,
            max_context_len=case.max_context_len,
            swa_spare_pages=0 if case.sliding_window else None,
            virtual_slots=case.virtual_slots,
            seed=case.seed,
            device=device,
        )
        self.backend = case.backend(implementation)
        self.layer, self.cache = self._layer(), self._new_cache()
        admitted = admit(self.pool, lens, (0,) * NUM_REQUESTS)
        self.rows = admitted.rows
        self.histories: list[History] = [
            tuple(self._randn(case.max_context_len, *shape) for shape in case.token_shapes) for _ in self.rows
        ]
        in_swa_pool = case.sliding_window and not isinstance(self.cache, DSV4Cache)
        admitted.write(self.cache, self.histories, sliding_window=in_swa_pool)
        self.query = self._randn(max(SIZES) * self.width, *case.query_shape)
        self.out = torch.zeros(len(self.query), *case.out_shape, dtype=DTYPE, device=device)
        self.runner = make(self.backend, case, self.pool, SIZES, self._body)

    @property
    def width(self) -> int:
        return int(self.case.mode.num_tokens_per_req)

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        """Return four K/V lengths: short, at the end of a page, one token after the end of a page, and the longest."""
        size = self.case.page_size
        return self.width + 1, 2 * size, 3 * size + 1, self.case.max_context_len

    def batch(self, *totals: int, first_request: int = 0) -> ForwardBatch:
        """Return a batch of consecutive requests of the pool. `totals` are their numbers of keys, new tokens included."""
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
            num_draft_tokens=self.width,
        )

    def widths(self, count: int) -> list[int]:
        """Return the number of query rows of each request: 1 to `width` if the mode allows unequal numbers, else `width`."""
        ragged = self.case.mode.forward_mode.query_rows.are_unequal_drafts
        return [i % self.width + 1 if ragged else self.width for i in range(count)]

    def replay(self, batch: ForwardBatch, padding: float = 0.0) -> ReplayedPass:
        """Draw the batch's queries, fill padding rows of the query with `padding`, and replay a graph."""
        rows = batch.num_tokens
        self.query[:rows].copy_(self._randn(rows, *self.query.shape[1:]))
        self.query[rows:].fill_(padding)
        self.out.fill_(float("nan"))
        self.runner.replay(batch)
        captured = self.runner.captured[self.runner.size_for(batch.batch_size)]
        return ReplayedPass(self.query[:rows].clone(), self.out[:rows].clone(), captured.metadata, captured.view)

    def eager(self, batch: ForwardBatch) -> ReplayedPass:
        metadata = self.runner.eager(batch)
        query = self._randn(batch.num_tokens, *self.query.shape[1:])
        out = torch.full((len(query), *self.out.shape[1:]), float("nan"), dtype=DTYPE, device=self.device)
        self._prepare(batch, metadata, query, out)()
        return ReplayedPass(query, out, metadata)

    def poison(self, value: float) -> None:
        """Fill page 0 of the cache with `value`, and overwrite the metadata of all captured graphs: page tables with page 0,
        the tensors named in `rewritten` with `POISONED_LENGTH`.

        The next replay must write all metadata again, and must not read page 0, which no request owns. If a replay does not
        write a cell of a page table, it reads page 0, and `value` shows in its output.
        """
        pools = [self.cache.window, self.cache.compressed] if isinstance(self.cache, DSV4Cache) else [self.cache]
        for each in pools:
            (each.storage[:, 0] if isinstance(each, PagedKVCache) else each.storage[0]).fill_(value)
        for owner, name in itertools.product(self._metadata_owners(), (*self.tables, *self.rewritten)):
            if (tensor := getattr(owner, name)) is not None:
                filled = tensor[1:] if name.startswith("cu_") else tensor
                filled.fill_(0 if name in self.tables else POISONED_LENGTH)

    def wrongs(self, batch: ForwardBatch, result: ReplayedPass) -> Iterator[str]:
        if wrong := self._wrong_metadata(batch, result):
            yield wrong
        if result.view is not None:
            yield from self._wrong_padding(batch, result.metadata, result.view)
        yield from self._wrong_output(batch, result)

    def pointers(self) -> dict[str, int]:
        tensors: dict[str, Any] = {"query": self.query, "out": self.out}
        for number, owner in enumerate((self.runner.inputs, *self._metadata_owners())):
            for name, value in vars(owner).items():
                tensors[name if name not in tensors else f"{name} of {number}"] = value
        return {name: tensor.data_ptr() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}

    @property
    def rewritten(self) -> tuple[str, ...]:
        """Return the names of the metadata tensors, apart from page tables, that each replay writes again."""
        raise NotImplementedError

    def _layer(self) -> Any:
        raise NotImplementedError

    def _new_cache(self) -> Any:
        raise NotImplementedError

    def _uncounted(self) -> int:
        """Return the number of tokens of a request, such as drafted tokens, that `seq_lens` of the batch does not count."""
        return uncounted_tokens(self.runner.inputs.view(1))

    def _metadata_owners(self) -> tuple[Any, ...]:
        metadata = self.runner.metadata
        return (metadata.buffers,) if isinstance(metadata, GraphMetadata) else tuple(metadata.metadata.values())

    def _wrong_metadata(self, batch: ForwardBatch, result: ReplayedPass) -> str:
        raise NotImplementedError

    def _padded_metadata(self, batch: ForwardBatch, metadata: Any, length: int, pages: int) -> Cells:
        """Return {name: (metadata of padding requests, the right value)}. Each has `length` tokens and `pages` pages."""
        raise NotImplementedError

    def _truth(self, query: Tensor, seen: list[History], q_lens: list[int]) -> Truth:
        raise NotImplementedError

    def _prepare(
        self, batch: ForwardBatch, metadata: Any, query: Tensor, out: Tensor, **buffers: Tensor
    ) -> Callable[[], Tensor]:
        most = self.case.max_context_len
        call: Callable[[], Tensor] = self.backend.prepare_attention(
            batch, metadata, self.layer, query, self.cache, max_context_len=most, out=out, **buffers
        )
        return call

    def _body(self, view: ForwardBatch, metadata: Any) -> Callable[[], Tensor]:
        rows = view.num_tokens
        return self._prepare(view, metadata, self.query[:rows], self.out[:rows], **self._buffers(rows))

    def _buffers(self, rows: int) -> dict[str, Tensor]:
        """Return further arguments of the backend's `prepare_attention`: buffers that a graph of `rows` query rows reads."""
        return {}

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator).to(DTYPE)

    def _wrong_padding(self, batch: ForwardBatch, metadata: Any, view: ForwardBatch) -> Iterator[str]:
        # An engine writes K and V of padding rows too. Their slots and pages must be those of page 0, the sink.
        count = batch.batch_size
        length = self.case.padded_seq_len + self._uncounted()
        uniform: Cells = {
            "seq_lens": (view.seq_lens[count:], self.case.padded_seq_len),
            "req_pool_indices": (view.req_pool_indices[count:], 0),
            "out_cache_loc": (view.out_cache_loc[batch.num_tokens :], 0),
            "extend_seq_lens": (None if view.extend_seq_lens is None else view.extend_seq_lens[count:], self.width),
        }
        uniform |= self._padded_metadata(batch, metadata, length, -(-length // self.case.page_size))
        for name, (got, wanted) in uniform.items():
            if got is not None and bool((got != wanted).any()):
                yield f"{name} of padded rows is {got.tolist()}, expected {wanted} everywhere"

    def _wrong_output(self, batch: ForwardBatch, result: ReplayedPass) -> Iterator[str]:
        if bad := int((~result.out.isfinite()).any(-1).sum()):
            yield f"{bad} output vectors of real rows are not finite"
        widths = self.widths(batch.batch_size)
        counts_rows = self.case.mode.forward_mode.uncounted is UncountedTokens.QUERY_ROWS
        uncounted = widths if counts_rows else [self._uncounted()] * batch.batch_size
        requests = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), uncounted, strict=True)
        seen = [
            tuple(side[: length + new] for side in self.histories[self.rows.index(row)])
            for row, length, new in requests
        ]
        comparison = self._truth(result.query, seen, widths).compare(result.out)
        self.worst_ratio = max(self.worst_ratio, comparison.worst_ratio)
        if not comparison.passed:
            count = int(comparison.faulty.sum())
            yield f"{count} output vectors are wrong, the worst {comparison.worst_ratio:.3g} times what is allowed"
