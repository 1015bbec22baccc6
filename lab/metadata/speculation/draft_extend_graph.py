"""The draft extend of speculative decoding in CUDA graphs: its inputs, the rows that it returns, and the test whether a backend
supports it.

SGLang's change 25002 runs the draft model's catch-up on accepted tokens (``DRAFT_EXTEND_V2``) in a graph. Every request has the
same number of rows, however many tokens were accepted. The worker needs only the row of the last accepted token. Which rows the
graph returns has changed from release to release; `DraftExtendOutput` names the choices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lab.metadata.engine.backend import Backend
from lab.metadata.engine.cuda_graph import Body, GraphRunner
from lab.metadata.engine.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.metadata.engine.kv_pool import KVPool
from lab.named_enum import NamedEnum


class DraftExtendOutput(NamedEnum):
    """The rows of a draft extend whose logits are computed. Each request has d rows, of which accept_lens are accepted."""

    ALL_ROWS = "all rows"  # SGLang 0.5.13, 0.5.14: logits and hidden states of all batch_size * d rows
    # The same, and the most probable token of each row, which nobody reads: what the body captured by 0.5.13 computes.
    ALL_ROWS_WITH_TOPK = "all rows with top-k"
    # SGLang 0.5.23: row i * d + accept_lens[i] - 1 of request i, chosen inside the graph before the LM head.
    SELECTED_ROW = "selected row"

    def num_rows(self, batch_size: int, num_tokens: int) -> int:
        """Return the number of output rows: one per request with SELECTED_ROW, else one per query row."""
        return batch_size if self is DraftExtendOutput.SELECTED_ROW else num_tokens


def selected_rows(accept_lens: Tensor, num_tokens_per_req: int) -> Tensor:
    """Return the row of each request's last accepted token, i * d + accept_lens[i] - 1, int64 [batch_size].

    ``accept_lens`` is int32 or int64 [batch_size], each from 1 to d = ``num_tokens_per_req``. The host reads nothing.
    """
    first_rows = torch.arange(accept_lens.shape[0], device=accept_lens.device) * num_tokens_per_req
    return first_rows + accept_lens - 1


@dataclass(frozen=True, eq=False)
class DraftInputs:
    """The inputs of a draft model's forward pass, without the attention metadata."""

    input_ids: Tensor  #: int64 [num_tokens]
    hidden_states: Tensor  #: [num_tokens, hidden_size], the target model's hidden states
    #: int64 [batch_size], for `DraftExtendOutput.SELECTED_ROW`: the row of each request whose logits are computed
    select_index: Tensor

    def first(self, batch_size: int, num_tokens: int) -> "DraftInputs":
        return DraftInputs(self.input_ids[:num_tokens], self.hidden_states[:num_tokens], self.select_index[:batch_size])

    def load(self, input_ids: Tensor, hidden_states: Tensor, select_index: Tensor | None = None) -> None:
        """Copy a batch's inputs into the buffers. Further rows of the buffers keep their contents, as in SGLang.

        The arguments have the dtypes and shapes of the attributes, with at most as many rows.

        Raises:
            ValueError, TypeError: a tensor has a shape or dtype that a copy would broadcast or convert silently.
        """
        given = {"input_ids": input_ids, "hidden_states": hidden_states}
        if select_index is not None:
            given["select_index"] = select_index
        if hidden_states.shape[0] != input_ids.shape[0]:
            raise ValueError(f"{input_ids.shape[0]} input_ids for {hidden_states.shape[0]} rows of hidden_states")
        for name, tensor in given.items():
            buffer = getattr(self, name)
            if tensor.dtype != buffer.dtype:
                raise TypeError(f"{name} has dtype {tensor.dtype}, expected {buffer.dtype}")
            if tensor.shape[1:] != buffer.shape[1:] or tensor.shape[0] > buffer.shape[0]:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, which does not fit the buffer's {list(buffer.shape)}"
                )
        for name, tensor in given.items():
            getattr(self, name)[: tensor.shape[0]].copy_(tensor)


@dataclass(frozen=True, eq=False)
class DraftOutputs:
    """The outputs of a draft model: a row per query row, or a row per request with `DraftExtendOutput.SELECTED_ROW`."""

    logits: Tensor  #: float32 [num_rows, vocab_size]
    hidden_states: Tensor  #: [num_rows, hidden_size]
    #: float32 [num_rows, 1], all ones: the probability of this token in a chain of drafts (topk = 1); or None
    topk_p: Tensor | None = None
    topk_index: Tensor | None = None  #: int64 [num_rows, 1], the most probable token of each row; or None

    def first(self, num_rows: int) -> "DraftOutputs":
        """Return the first `num_rows` rows of all outputs, as slices of the same storage."""
        held: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        return DraftOutputs(**{name: value[:num_rows] for name, value in held.items()})


def supports_draft_extend_graph(backend: object) -> bool:
    """Return True if a backend declares that its draft extend may run in a CUDA graph.

    SGLang has a list of classes instead, and every new backend has to be added to it. In 0.5.12 the list is Triton and TRT-LLM
    MLA; 0.5.13 adds TRT-LLM MHA and Tokenspeed MLA. In 0.5.23 it is Triton, TRT-LLM MLA and MHA, FlashInfer, QSA, DSA, DSV4,
    FlashAttention and FlashMLA. Here the backend, any object or None, declares it in an attribute with this function's name.
    """
    return getattr(backend, "supports_draft_extend_graph", False) is True


class DraftModel(Protocol):
    """A protocol: the draft model that a graph runs, such as `studies.stand_in_model.StandInModel`."""

    def new_inputs(self, max_batch_size: int, max_num_tokens: int) -> DraftInputs:
        """Return zero-filled input buffers. Zeros are valid token ids and row indices."""
        ...

    def new_outputs(self, form: DraftExtendOutput, max_batch_size: int, max_num_tokens: int) -> DraftOutputs:
        """Return output buffers with a row per request or per query row, as `form` says."""
        ...

    def prepare(
        self,
        backend: Backend[Any],
        batch: ForwardBatch,
        metadata: Any,
        inputs: DraftInputs,
        outputs: DraftOutputs,
        form: DraftExtendOutput,
    ) -> Callable[[], object]:
        """Return a call, which a CUDA graph can capture: it reads `inputs`, writes K and V to the cache, fills `outputs`."""
        ...


def model_body(
    backend: Backend[Any], model: DraftModel, inputs: DraftInputs, outputs: DraftOutputs, form: DraftExtendOutput
) -> Body:
    """Return the `body` of a `GraphRunner` that runs the model on slices of the input and output buffers."""

    def body(view: ForwardBatch, metadata: Any) -> Callable[[], DraftOutputs]:
        read = inputs.first(view.batch_size, view.num_tokens)
        written = outputs.first(form.num_rows(view.batch_size, view.num_tokens))
        run = model.prepare(backend, view, metadata, read, written, form)

        def run_and_return() -> DraftOutputs:
            run()
            return written

        return run_and_return

    return body


class DraftExtendGraph:
    """CUDA graphs of a draft model's ``DRAFT_EXTEND_V2`` for several batch sizes, like those of SGLang's draft-extend runner.

    Args:
        spec_info: the number of rows per request, in the fields that `GraphMode.draft_extend_v2` reads.
        disable_padding: run only batches of exactly a captured size.

    Raises:
        ValueError: the backend does not declare `supports_draft_extend_graph`, or `spec_info` has no width.
    """

    def __init__(
        self,
        backend: Backend[Any],
        model: DraftModel,
        pool: KVPool,
        spec_info: SpecInfo,
        batch_sizes: Sequence[int],
        form: DraftExtendOutput = DraftExtendOutput.SELECTED_ROW,
        *,
        place: MetadataPlace = MetadataPlace.IN_GRAPH,
        disable_padding: bool = False,
    ) -> None:
        if not supports_draft_extend_graph(backend):
            raise ValueError(
                f"{type(backend).__name__} does not declare supports_draft_extend_graph: run its draft extend eagerly"
            )
        mode = GraphMode.draft_extend_v2(spec_info)
        most_rows = max(batch_sizes, default=0) * mode.num_tokens_per_req
        self.width = mode.num_tokens_per_req
        self.form = form
        self.disable_padding = disable_padding
        self.inputs = model.new_inputs(max(batch_sizes, default=0), most_rows)
        self.outputs = model.new_outputs(form, max(batch_sizes, default=0), most_rows)

        body = model_body(backend, model, self.inputs, self.outputs, form)
        self.runner = GraphRunner(backend, mode, pool, batch_sizes, body, place)

    def can_run(self, batch: ForwardBatch) -> bool:
        """Return True if a graph can run this batch: it has the captured number of rows per request and fits a captured size.

        If `num_tokens_per_req` is not set (-1 here, 0 in SGLang), the batch's number of rows decides.
        """
        bs, sizes = batch.batch_size, self.runner.captured
        stated = -1 if batch.spec_info is None else batch.spec_info.num_tokens_per_req
        has_width = (
            stated in (-1, self.width)
            and batch.num_tokens == batch.out_cache_loc.shape[0] == bs * self.width
            and set(batch.extend_seq_lens_cpu or ()) <= {self.width}
        )
        fits = bs in sizes if self.disable_padding else 0 < bs <= max(sizes)
        return batch.forward_mode.query_rows is QueryRows.FIXED and has_width and fits

    def replay(
        self, batch: ForwardBatch, input_ids: Tensor, hidden_states: Tensor, accept_lens: Tensor | None = None
    ) -> DraftOutputs:
        """Run the draft extend of a batch in the graph of the smallest captured size that holds it.

        Padded rows keep the ids, hidden states and selected rows of earlier replays, as in SGLang. A selected row of request i
        lies in the request's own rows, so an index left from an earlier replay is valid in every size that holds request i.

        Args:
            batch: a batch for which `can_run` is True.
            input_ids, hidden_states: as in `DraftInputs`.
            accept_lens: int32 or int64 [batch_size], 1 to d each; the host does not read it. Required for SELECTED_ROW, refused
                for other forms.

        Returns:
            The outputs of the batch's own rows. With SELECTED_ROW `logits` are the graph's own buffer, and `hidden_states` a
            copy, because the worker keeps them until the next draft (SGLang clones them). With the other forms all outputs
            are the graph's own buffers. The next replay of any size overwrites the graph's buffers.

        Raises:
            ValueError: the batch cannot run in a graph, or `accept_lens` is missing or not allowed. Nothing has been copied
                then.
        """
        if not self.can_run(batch):
            raise ValueError(
                f"{batch.forward_mode!r} of {batch.batch_size} requests and {batch.num_tokens} rows does not fit the graphs of "
                f"width {self.width} and sizes {sorted(self.runner.captured)}: ask can_run, and run it eagerly"
            )
        select_index = self._select_index(batch, accept_lens)
        if input_ids.shape[0] != batch.num_tokens:
            raise ValueError(f"{input_ids.shape[0]} input_ids for {batch.num_tokens} rows")
        self.inputs.load(input_ids, hidden_states, select_index)
        padded: DraftOutputs = self.runner.replay(batch)
        result = padded.first(self.form.num_rows(batch.batch_size, batch.num_tokens))
        if self.form is DraftExtendOutput.SELECTED_ROW:
            return replace(result, hidden_states=result.hidden_states.clone())
        return result

    def _select_index(self, batch: ForwardBatch, accept_lens: Tensor | None) -> Tensor | None:
        selects = self.form is DraftExtendOutput.SELECTED_ROW
        if selects != (accept_lens is not None):
            raise ValueError(
                f"accept_lens={'given' if accept_lens is not None else None}: {self.form!r} "
                f"{'selects by it' if selects else 'has no use for it'}"
            )
        if accept_lens is None:
            return None
        if accept_lens.shape != (batch.batch_size,):
            raise ValueError(f"accept_lens has shape {list(accept_lens.shape)} for {batch.batch_size} requests")
        return selected_rows(accept_lens, self.width)
