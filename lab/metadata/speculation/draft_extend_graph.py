"""The draft extend of speculative decoding in CUDA graphs (SGLang's change 25002). In a ``DRAFT_EXTEND_V2`` the draft model
computes the tokens that the target model has accepted. Every request has d query rows, and the engine needs only the row of the
last accepted token. Which rows a graph returns differs between SGLang's releases (`DraftExtendOutput`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lab.metadata.engine.backend import Backend, in_turn
from lab.metadata.engine.cuda_graph import Body, GraphRunner, check_sizes
from lab.metadata.engine.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.metadata.engine.kv_pool import KVPool
from lab.named_enum import NamedEnum


class DraftExtendOutput(NamedEnum):
    """The query rows whose logits a draft extend computes. Of request i, the first accept_lens[i] rows are accepted."""

    ALL_ROWS = "all rows"  # SGLang 0.5.13, 0.5.14: logits and hidden states of all batch_size * d rows
    ALL_ROWS_WITH_TOPK = "all rows with top-k"  # in addition the most probable token of each row: SGLang 0.5.13's graph
    # SGLang 0.5.23: row i * d + accept_lens[i] - 1 of request i, selected inside the graph before the LM head.
    SELECTED_ROW = "selected row"

    def num_rows(self, batch_size: int, num_tokens: int) -> int:
        return batch_size if self is DraftExtendOutput.SELECTED_ROW else num_tokens


def selected_rows(accept_lens: Tensor, num_tokens_per_req: int) -> Tensor:
    """Return the query row index of each request's last accepted token, int64 [batch_size]. `accept_lens` are at least 1."""
    first_rows = torch.arange(accept_lens.shape[0], device=accept_lens.device) * num_tokens_per_req
    return first_rows + accept_lens - 1


@dataclass(frozen=True, eq=False)
class DraftInputs:
    input_ids: Tensor  #: int64 [num_tokens]
    hidden_states: Tensor  #: [num_tokens, hidden_size], the target model's hidden states
    #: int64 [batch_size], for `DraftExtendOutput.SELECTED_ROW`: the row of each request whose logits are computed
    select_index: Tensor

    def first(self, batch_size: int, num_tokens: int) -> "DraftInputs":
        return DraftInputs(self.input_ids[:num_tokens], self.hidden_states[:num_tokens], self.select_index[:batch_size])

    def load(self, input_ids: Tensor, hidden_states: Tensor, select_index: Tensor | None = None) -> None:
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
            getattr(self, name)[: tensor.shape[0]].copy_(tensor)  # later rows keep their contents, as in SGLang


@dataclass(frozen=True, eq=False)
class DraftOutputs:
    """The output tensors of a draft model: one row per query row, or per request if only one row of a request is selected."""

    logits: Tensor  #: float32 [num_rows, vocab_size]
    hidden_states: Tensor  #: [num_rows, hidden_size]
    #: float32 [num_rows, 1], ones: in a chain (topk = 1) the probability of the one chosen token; None without top-k
    topk_p: Tensor | None = None
    topk_index: Tensor | None = None  #: int64 [num_rows, 1], the most probable token of each row; None without top-k

    def first(self, num_rows: int) -> "DraftOutputs":
        held: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        return DraftOutputs(**{name: value[:num_rows] for name, value in held.items()})


def supports_draft_extend_graph(backend: object) -> bool:
    """Return True if a backend declares that CUDA graphs can capture its draft extend. SGLang has a list of classes instead, in
    0.5.23 Triton, TRT-LLM MLA and MHA, FlashInfer, QSA, DSA, DSV4, FlashAttention and FlashMLA.
    """
    return getattr(backend, "supports_draft_extend_graph", False) is True


class DraftModel(Protocol):
    """The draft model that a CUDA graph runs in a draft extend, such as `studies.stand_in_model.StandInModel`."""

    def new_inputs(self, max_batch_size: int, max_num_tokens: int) -> DraftInputs:
        """Return input buffers of zeros, which are valid token ids and row indices."""
        ...

    def new_outputs(self, form: DraftExtendOutput, max_batch_size: int, max_num_tokens: int) -> DraftOutputs: ...

    def prepare(
        self,
        backend: Backend[Any],
        batch: ForwardBatch,
        metadata: Any,
        inputs: DraftInputs,
        outputs: DraftOutputs,
        form: DraftExtendOutput,
    ) -> Callable[[], object]:
        """Return a function that a CUDA graph can capture. It writes K, V, and the outputs of the rows that `form` selects."""
        ...


def model_body(
    backend: Backend[Any], model: DraftModel, inputs: DraftInputs, outputs: DraftOutputs, form: DraftExtendOutput
) -> Body:
    def body(view: ForwardBatch, metadata: Any) -> Callable[[], DraftOutputs]:
        read = inputs.first(view.batch_size, view.num_tokens)
        written = outputs.first(form.num_rows(view.batch_size, view.num_tokens))
        return in_turn([model.prepare(backend, view, metadata, read, written, form)], written)

    return body


class DraftExtendGraph:
    """The CUDA graphs of a draft model's draft extend (``DRAFT_EXTEND_V2``), one per batch size, as in SGLang's draft-extend
    runner. A request has `spec_info.num_tokens_per_req` query rows. With `disable_padding` only captured batch sizes run.
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
        check_sizes(batch_sizes)
        most_requests = max(batch_sizes)
        most_rows = most_requests * mode.num_tokens_per_req
        self.width = mode.num_tokens_per_req
        self.form = form
        self.disable_padding = disable_padding
        self.inputs = model.new_inputs(most_requests, most_rows)
        self.outputs = model.new_outputs(form, most_requests, most_rows)
        body = model_body(backend, model, self.inputs, self.outputs, form)
        self.runner = GraphRunner(backend, mode, pool, batch_sizes, body, place)

    def can_run(self, batch: ForwardBatch) -> bool:
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
        """Run the draft extend of a batch for which `can_run` is True. `accept_lens`, int32 or int64 [batch_size], has the
        number of accepted tokens of each request, at least 1, which the host does not read. It is None unless the graph's
        `form` is `DraftExtendOutput.SELECTED_ROW`.

        Return the outputs without padding, as slices of the graph's buffers, which the next replay overwrites. With
        SELECTED_ROW `hidden_states` is a copy, because an engine keeps it until the next draft (SGLang clones it). Padding
        rows keep the ids, hidden states and selected rows of earlier replays, as in SGLang.
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
