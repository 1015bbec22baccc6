"""Build the metadata of a verify pass on a second stream while the draft runs. Each backend declares whether a part of its
metadata depends on the draft.

A draft proposes a chain of tokens for each request, or a tree. A chain's verify metadata depends on lengths, request rows, the
request table and the draft's width, which are all known before the draft runs. So it can be planned while the draft runs, and
no part of it is written again after the draft (SGLang's change 25925). A tree's mask depends on the draft. Its backend declares
this, and writes the mask after the draft.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lab.metadata.engine.forward_batch import ForwardBatch
from lab.named_enum import NamedEnum

VerifiedT = TypeVar("VerifiedT")


class FixUp(NamedEnum):
    """Whether a part of the planned metadata (the fix-up) must be written again after the draft."""

    NONE = "none"
    AFTER_DRAFT = "after the draft"


class PlanStart(NamedEnum):
    """The event that a plan waits for.

    In SGLang 0.5.13 a plan waited for nothing. That is right only if the host happens to be late, so the lab does not offer it.
    """

    IN_LINE = "in line"  # no second stream: after the draft, on its stream, as SGLang does by default
    AFTER_DRAFT = "after the draft"  # 0.5.11 and 0.5.12; 0.5.23, by waiting for all that the forward stream then holds
    AFTER_INPUTS = "after the inputs"  # while the draft runs


@dataclass(frozen=True, eq=False)
class PlannedVerify:
    """The buffers that a verify pass reads, filled by a plan. The next plan overwrites them."""

    batch: ForwardBatch  #: the captured size's view of the inputs, padded rows included
    metadata: Any
    #: uint16 ``[batch_size, d, 2 * ceil(d / 32)]`` for d draft tokens, the decode call's ``mask``; None: rows are causal
    mask: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that the kernel takes, by its name in the metadata; the mask's name is "mask"."""
        named = vars(self.metadata) | {"mask": self.mask}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}


# The buffers that the draft stage fills: [tree, positions], None where it keeps its own.
VerifyBuffers = Sequence[Tensor | None]
Draft = Callable[[VerifyBuffers], object]


class VerifyBackend(ABC):
    """The part of an attention backend that plans a verify pass. The two methods named `..._after_draft` have SGLang's names.

    Attributes:
        fix_up: declared by every backend. NONE: no part of the plan depends on the draft's tokens, positions or tree.
            AFTER_DRAFT: the backend defines `update_verify_buffers_to_fill_after_draft`. None, the default, declares nothing:
            `PlanStream` refuses the backend.
    """

    fix_up: FixUp | None = None

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def check(self, batch: ForwardBatch) -> None:
        """Raise ValueError if a batch cannot be planned. This launches nothing."""

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> PlannedVerify:
        """Launch, on the current stream, all work of the plan that does not depend on the draft. The host reads nothing."""

    def get_verify_buffers_to_fill_after_draft(self) -> VerifyBuffers:
        """Return ``[tree, positions]``, the buffers that the draft stage fills; None for one that it owns itself."""
        return [None, None]

    def update_verify_buffers_to_fill_after_draft(self, planned: PlannedVerify) -> None:
        """Launch the fix-up on the current stream: the work that depends on the buffers that the draft has filled. The default
        does nothing with FixUp.NONE, else it raises NotImplementedError.
        """
        if self.fix_up is not FixUp.NONE:
            raise NotImplementedError(_missing_fix_up(self))


def check_contract(backend: VerifyBackend) -> None:
    """Check that a backend declares whether its plans need a fix-up, and that its methods agree.

    Raises:
        NotImplementedError: the backend declares nothing, or declares a fix-up and does not define it.
        ValueError: the backend declares that no fix-up is needed, and defines one.
    """
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
    """Run speculative iterations. The verify pass is planned while the draft runs, on a second stream if there is a GPU.

    Four events order the work. The last column says what would go wrong without each:

    ============  ======================  ===============  =================================================================
    event         recorded                waited for by    without it
    ============  ======================  ===============  =================================================================
    inputs final  before the draft, or    the plan         it reads lengths or slots that are still being written
                  by the caller
    draft ended   after the draft         the plan, where  (only delays the plan: no metadata depends on the draft)
                                          AFTER_DRAFT
    planned       after the plan          the forward      verify reads the metadata of an earlier batch
                                          stream
    verified      after verify            the next plan    it overwrites what this verify still reads
    ============  ======================  ===============  =================================================================

    `verified` is needed if the next batch's inputs are final before this batch's verify has ended, for example if two batches
    alternate. Otherwise the inputs are written after verify on the forward stream, and waiting for the inputs is enough.

    The fix-up is launched on the forward stream, after the draft and the plan, and so needs no event. On a CPU everything runs
    in order.

    The batch's tensors must be allocated on the forward stream, the one that is current when `run` is called. Then
    ``Tensor.record_stream`` is not needed: the memory is used again on the forward stream, and the batch is held until that
    stream waits for the plan that reads it. The memory of a tensor from another stream is used again on that stream, which does
    not wait for the plan: call ``record_stream(planner.stream)`` on such a tensor, or hold it until that stream has waited. The
    buffers that a plan writes are never freed.

    Args:
        backend: makes the plan and the fix-up.
        start: the event that a plan waits for.

    Raises:
        NotImplementedError, ValueError: `check_contract` refuses the backend; nothing has run.
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
            # One of each is enough: an event may be recorded anew as soon as its wait is enqueued.
            self._events = {moment: torch.cuda.Event() for moment in _Moment}

    def run(
        self,
        batch: ForwardBatch,
        draft: Draft,
        verify: Callable[[PlannedVerify], VerifiedT],
        inputs_final: torch.cuda.Event | None = None,
    ) -> VerifiedT:
        """Run one iteration on the current stream: draft, plan at the same time, fix-up, verify. The host never waits.

        The draft is launched first, so that the GPU has work while the host launches the plan. If the draft's launches take
        longer on the host than on the GPU, the plan does not overlap with the draft.

        Args:
            batch: a TARGET_VERIFY batch, allocated on the current stream (see the class). Its tensors, and its draft tokens'
                entries in the request table, are final after the work now on the current stream, or after `inputs_final`.
            draft: fills the buffers that it receives. It must not write a tensor of the batch.
            verify: launches the target model's pass.
            inputs_final: the event after which the batch's tensors are final; None: they are final after the work now on the
                current stream. The event may be earlier, or of another stream. Every plan waits for it, whatever its `start`.
                It must be None on a CPU, where everything runs in order.

        Returns:
            The result of `verify`.

        Raises:
            ValueError: the batch cannot be planned, or an event was passed on a CPU; nothing has run.
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
        stream.wait_event(self._events[_Moment.VERIFIED])  # of the iteration before; the first one has none to wait for

    def _wait_for_plan(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.backend.device).wait_event(self._events[_Moment.PLANNED])

    def _fix_up(self, planned: PlannedVerify) -> None:
        self.backend.update_verify_buffers_to_fill_after_draft(planned)

    def _mark(self, moment: _Moment) -> None:
        if self.stream is not None:
            self._events[moment].record(torch.cuda.current_stream(self.backend.device))


def verify_metadata_under(planner: PlanStream, batch: ForwardBatch, drafts: Iterable[Draft]) -> list[dict[str, Tensor]]:
    """Run the same batch once with each draft, and return copies of all tensors that each verify pass received.

    The drafts may differ in tokens, positions, tree and K/V. Only tensors that a fix-up writes may then differ, in any bit.
    """

    def copies(planned: PlannedVerify) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in planned.tensors().items()}

    return [planner.run(batch, draft, copies) for draft in drafts]
