"""Build the metadata of a verify pass on a second stream while the draft runs (SGLang's change 25925).

* plan: the launches that write the metadata of the next verify pass.
* fix-up: the launches that write, after the draft, the part of the metadata that depends on the draft.

The verify metadata of a chain of drafts depends only on what is known before the draft runs, and needs no fix-up. The mask of a
tree depends on the draft. Each backend declares whether it has a fix-up.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lab.metadata.engine.backend import Backend
from lab.metadata.engine.cuda_graph import check_sizes, size_for, sized_passes
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.graph_inputs import GraphMode, StaticInputs
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import check_attends
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.speculation.verify_mask import VerifyMask, pack_tree_mask
from lab.named_enum import NamedEnum

FUSED_MHA = TRTLLMMHABackend()
VerifiedT = TypeVar("VerifiedT")


class FixUp(NamedEnum):
    """Whether a part of the verify pass's metadata depends on the draft, and must be written after the draft (in a fix-up)."""

    NONE = "none"
    AFTER_DRAFT = "after the draft"


class PlanStart(NamedEnum):
    """When and where a verify pass's metadata is built. SGLang 0.5.13, which does not wait for the inputs, is not modelled."""

    IN_LINE = "in line"  # on the forward stream, after the draft: SGLang's default
    AFTER_DRAFT = "after the draft"  # on a second stream, after the draft: SGLang 0.5.11, 0.5.12 and 0.5.23
    AFTER_INPUTS = "after the inputs"  # on a second stream, after the batch's tensors are written: while the draft runs


@dataclass(frozen=True, eq=False)
class PlannedVerify:
    """The batch, metadata and mask of a verify pass, in buffers that the next `VerifyBackend.plan` overwrites."""

    batch: ForwardBatch  #: the input buffers of a captured batch size, padding included
    metadata: Any
    #: uint16 ``[batch_size, d, 2 * ceil(d / 32)]`` for d draft tokens, the decode call's ``mask``; None: rows are causal
    mask: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that the verify pass's kernel takes, by its name in the metadata, and the "mask"."""
        named = vars(self.metadata) | {"mask": self.mask}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def copies(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors().items()}


# The backend's buffers that the draft fills: [tree, positions]. None: the draft has its own.
VerifyBuffers = Sequence[Tensor | None]
Draft = Callable[[VerifyBuffers], object]


class VerifyBackend(ABC):
    """The part of an attention backend that plans a verify pass, that is, builds its metadata. The methods named
    `..._after_draft` have SGLang's names.

    Attributes:
        fix_up: NONE: no part of the plan depends on the draft's tokens, positions or tree. AFTER_DRAFT: the backend defines
            `update_verify_buffers_to_fill_after_draft`. A subclass must set it: `PlanStream` refuses None.
    """

    fix_up: FixUp | None = None

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def check(self, batch: ForwardBatch) -> None:
        """Raise ValueError if the backend cannot build the metadata of the batch's verify pass."""

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> PlannedVerify:
        """Launch the kernels that write the metadata that does not depend on the draft. The host does not read the device."""

    def get_verify_buffers_to_fill_after_draft(self) -> VerifyBuffers:
        """Return [tree mask or parents, positions], which the draft fills; None for a buffer that the draft itself has."""
        return [None, None]

    def update_verify_buffers_to_fill_after_draft(self, planned: PlannedVerify) -> None:
        """Launch the fix-up on the current stream, after the draft. It writes the metadata that depends on the draft."""
        if self.fix_up is not FixUp.NONE:
            raise NotImplementedError(_missing_fix_up(self))


def check_contract(backend: VerifyBackend) -> None:
    """Raise an error if a backend's `fix_up` is None, is AFTER_DRAFT without a fix-up method, or is NONE with such a method."""
    name = type(backend).__name__
    if backend.fix_up is None:
        raise NotImplementedError(
            f"{name} does not say whether what it plans depends on the draft: set fix_up to FixUp.NONE, or to "
            "FixUp.AFTER_DRAFT and define update_verify_buffers_to_fill_after_draft"
        )
    inherited = VerifyBackend.update_verify_buffers_to_fill_after_draft
    defines = type(backend).update_verify_buffers_to_fill_after_draft is not inherited
    if backend.fix_up is FixUp.AFTER_DRAFT and not defines:
        raise NotImplementedError(_missing_fix_up(backend))
    if backend.fix_up is FixUp.NONE and defines:
        raise ValueError(
            f"{name} has fix_up=FixUp.NONE, so its update_verify_buffers_to_fill_after_draft would never be called: remove "
            "it, or say FixUp.AFTER_DRAFT"
        )


def _missing_fix_up(backend: VerifyBackend) -> str:
    name = type(backend).__name__
    return f"{name} has fix_up={backend.fix_up!r} but no update_verify_buffers_to_fill_after_draft: define it"


class _Moment(NamedEnum):
    INPUTS_FINAL = "inputs final"
    DRAFT_ENDED = "draft ended"
    PLANNED = "planned"
    VERIFIED = "verified"


class PlanStream:
    """Runs speculative iterations. On a GPU, a second stream builds the metadata of the verify pass (the plan), by default
    while the draft runs. With `PlanStart.IN_LINE` or on a CPU, there is no second stream.

    The forward stream is the stream that is current when `run` is called. Four events order the work:

    * inputs final: recorded before the draft, or by the caller. The plan waits for it, because it reads lengths and slots.
    * draft ended: recorded after the draft. The plan waits for it only with `PlanStart.AFTER_DRAFT`.
    * planned: recorded after the plan. The forward stream waits for it before the verify pass reads the metadata.
    * verified: recorded after the verify pass. The next plan waits for it before it overwrites the metadata. This matters if
      the next batch's inputs are final before this verify pass has ended, for example if two batches alternate.

    A backend whose `fix_up` is `FixUp.AFTER_DRAFT` writes the part of the metadata that depends on the draft in a fix-up. The
    fix-up is launched on the forward stream, after the draft and the wait for the plan, and so needs no event of its own.

    The batch's tensors should be allocated on the forward stream, which waits for the plan before torch's allocator can reuse
    their memory. On a tensor from another stream, call ``record_stream(planner.stream)``. Raises the errors of
    `check_contract`.
    """

    def __init__(self, backend: VerifyBackend, start: PlanStart = PlanStart.AFTER_INPUTS) -> None:
        check_contract(backend)
        self.backend = backend
        self.start = start
        self.stream: torch.cuda.Stream | None = None
        self._events: dict[_Moment, torch.cuda.Event] = {}
        if backend.device.type == "cuda" and start is not PlanStart.IN_LINE:
            self.stream = torch.cuda.Stream(backend.device)
            self.stream.wait_stream(torch.cuda.current_stream(backend.device))  # for the buffers' first contents
            # One event per moment is enough: it may be recorded again as soon as the wait for it is enqueued.
            self._events = {moment: torch.cuda.Event() for moment in _Moment}

    def run(
        self,
        batch: ForwardBatch,
        draft: Draft,
        verify: Callable[[PlannedVerify], VerifiedT],
        inputs_final: torch.cuda.Event | None = None,
    ) -> VerifiedT:
        """Run one iteration: the draft and, at the same time, the plan of the verify pass (its metadata); then the writes that
        depend on the draft; last `verify`. Return the result of `verify`.

        The host never waits. It launches the draft before the plan. If it launches the draft more slowly than the GPU runs it,
        the plan does not overlap with the draft.

        Args:
            draft: fills the buffers that it receives. It must not write a tensor of the batch.
            inputs_final: an event for which the plan waits. After it, the batch's tensors, and the entries of its draft tokens
                in the request table, are final. None: they are final after the work that is on the current stream now. It must
                be None on a CPU, where everything runs in order.

        Raises ValueError, before anything has run, if the batch cannot be planned or an event was passed on a CPU.
        """
        self.backend.check(batch)
        if inputs_final is not None and self.backend.device.type != "cuda":
            raise ValueError(
                f"inputs_final={inputs_final!r}, but nothing waits on a {self.backend.device}: leave it out"
            )
        self._mark(_Moment.INPUTS_FINAL)
        draft(self.backend.get_verify_buffers_to_fill_after_draft())
        self._mark(_Moment.DRAFT_ENDED)
        planned = self._plan(batch, inputs_final)
        self._wait_for_plan()
        if self.backend.fix_up is FixUp.AFTER_DRAFT:
            self._fix_up(planned)
        try:
            return verify(planned)
        finally:  # also after an error: what was launched still reads the metadata
            self._mark(_Moment.VERIFIED)

    def _plan(self, batch: ForwardBatch, inputs_final: torch.cuda.Event | None) -> PlannedVerify:
        if self.stream is None:
            if inputs_final is not None:
                self._wait_for_start(torch.cuda.current_stream(self.backend.device), inputs_final)
            return self.backend.plan(batch)
        with torch.cuda.stream(self.stream):
            self._wait_for_start(self.stream, inputs_final)
            self._wait_for_verified(self.stream)
            planned = self.backend.plan(batch)
            self._mark(_Moment.PLANNED)
        return planned

    def _wait_for_start(self, stream: torch.cuda.Stream, inputs_final: torch.cuda.Event | None) -> None:
        if self.start is PlanStart.AFTER_DRAFT:
            stream.wait_event(self._events[_Moment.DRAFT_ENDED])
        if inputs_final is not None:
            stream.wait_event(inputs_final)
        elif self.start is PlanStart.AFTER_INPUTS:
            stream.wait_event(self._events[_Moment.INPUTS_FINAL])

    def _wait_for_verified(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._events[_Moment.VERIFIED])  # of the previous iteration; no wait in the first

    def _wait_for_plan(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.backend.device).wait_event(self._events[_Moment.PLANNED])

    def _fix_up(self, planned: PlannedVerify) -> None:
        self.backend.update_verify_buffers_to_fill_after_draft(planned)

    def _mark(self, moment: _Moment) -> None:
        if self.stream is not None:
            self._events[moment].record(torch.cuda.current_stream(self.backend.device))


def verify_metadata_under(planner: PlanStream, batch: ForwardBatch, drafts: Iterable[Draft]) -> list[dict[str, Tensor]]:
    """Run the same batch once with each draft. Return, per draft, copies of all tensors that the verify pass received: name ->
    tensor. If the backend is correct, only the tensors that depend on the draft differ.
    """
    return [planner.run(batch, draft, PlannedVerify.copies) for draft in drafts]


class CapturedVerify(VerifyBackend):
    """A `VerifyBackend` for verify passes in CUDA graphs. `plan` writes the inputs and the metadata of a captured batch size.

    `attention`, TRT-LLM MHA or MLA, allocates the metadata buffers. `mask` is a buffer for the decode call's packed mask,
    uint16 ``[max(batch_sizes), d, 2 * ceil(d / 32)]``. If `mask` is None, rows are causal. MLA's kernel takes no mask.
    """

    def __init__(
        self,
        pool: KVPool,
        num_draft_tokens: int,
        batch_sizes: Sequence[int],
        attention: Backend[Any] = FUSED_MHA,
        mask: Tensor | None = None,
    ) -> None:
        check_sizes(batch_sizes)
        mode = GraphMode(ForwardMode.TARGET_VERIFY, num_draft_tokens)
        self.pool = pool
        self.num_draft_tokens = num_draft_tokens
        self.inputs = StaticInputs(mode, max(batch_sizes), pool.device)
        self.buffers = attention.new_buffers([mode], pool, max(batch_sizes))[mode]
        # Prepared now, to save the host's time in a plan.
        self._passes = sized_passes(self.inputs, self.buffers, batch_sizes)
        self._planned = {
            size: PlannedVerify(each.view, each.metadata, None if mask is None else mask[:size])
            for size, each in self._passes.items()
        }

    @property
    def device(self) -> torch.device:
        return self.pool.device

    def planned(self, batch_size: int) -> PlannedVerify:
        return self._planned[size_for(batch_size, list(self._planned))]

    def check(self, batch: ForwardBatch) -> None:
        self.planned(batch.batch_size)
        if batch.forward_mode.query_rows is not QueryRows.DRAFT_TOKENS:
            raise ValueError(f"{batch.forward_mode!r} is not verified: pass a TARGET_VERIFY batch")
        check_attends(batch, self.pool)
        if batch.num_tokens != batch.batch_size * self.num_draft_tokens:
            raise ValueError(
                f"the batch has {batch.num_tokens} rows for {batch.batch_size} requests, but this backend verifies "
                f"{self.num_draft_tokens} rows of each"
            )

    def plan(self, batch: ForwardBatch) -> PlannedVerify:
        planned = self.planned(batch.batch_size)
        size = planned.batch.batch_size
        self.inputs.load(batch, size)
        self._passes[size].rebuild()
        return planned


class ChainVerify(CapturedVerify):
    """Plans the verification of chains (top-k 1). Query rows are causal, so no part of the plan depends on the draft. The draft
    may fill `verify_mask`, as SGLang's does, but no kernel reads it. If `verify_mask` is None, the draft allocates a mask.
    """

    fix_up = FixUp.NONE

    def __init__(
        self,
        pool: KVPool,
        num_draft_tokens: int,
        batch_sizes: Sequence[int],
        attention: Backend[Any] = FUSED_MHA,
        verify_mask: VerifyMask | None = None,
    ) -> None:
        self.verify_mask = verify_mask
        super().__init__(pool, num_draft_tokens, batch_sizes, attention)

    def get_verify_buffers_to_fill_after_draft(self) -> VerifyBuffers:
        return [None if self.verify_mask is None else self.verify_mask.buffer, None]


class TreeMaskVerify(CapturedVerify):
    """Plans the verification of draft trees. The metadata is the same as for chains, and a mask lets each draft token see only
    itself and its ancestors among the draft tokens.

    Attributes:
        parents: ``[max_batch_size, d]`` int64, the index of each draft token's parent, -1 if it is the last accepted token. The
            draft writes it; before that the trees are chains.
        mask: uint16 ``[max_batch_size, d, 2 * ceil(d / 32)]``, which is written after the draft.
    """

    fix_up = FixUp.AFTER_DRAFT

    def __init__(
        self, pool: KVPool, num_draft_tokens: int, batch_sizes: Sequence[int], attention: Backend[Any] = FUSED_MHA
    ) -> None:
        chain = torch.arange(-1, num_draft_tokens - 1, device=pool.device)
        self.parents = chain.repeat(max(batch_sizes, default=0), 1)
        self.mask = pack_tree_mask(self.parents)
        super().__init__(pool, num_draft_tokens, batch_sizes, attention, self.mask)

    def get_verify_buffers_to_fill_after_draft(self) -> VerifyBuffers:
        return [self.parents, None]

    def update_verify_buffers_to_fill_after_draft(self, planned: PlannedVerify) -> None:
        assert planned.mask is not None
        pack_tree_mask(self.parents[: planned.batch.batch_size], out=planned.mask)
