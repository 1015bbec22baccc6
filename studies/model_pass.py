"""A forward pass of the stand-in model as timed work: eager, in a CUDA graph, and the copies before a replay."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.graph_inputs import GraphMode, StaticInputs
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.metadata import MHAGraphMetadata, build_mha_metadata
from lab.metadata.speculation.draft_extend_graph import (
    DraftExtendOutput,
    DraftInputs,
    DraftOutputs,
    model_body,
    selected_rows,
)
from lab.timing.work import Call, GpuWork
from lab.workloads.forward_case import ForwardCase
from studies.stand_in_model import StandInModel, StandInPass, StandInSizes, StandInTruth, truth_of_pass


def pass_bytes(sizes: StandInSizes, drawn: StandInPass, form: DraftExtendOutput) -> int:
    """Return the bytes that a pass must move at least once: weights, visible and new keys and values, inputs and outputs."""
    rows, head_rows = sum(drawn.q_lens), _head_rows(drawn, form)
    half, single = 2, 4  # bytes of bf16 and float32
    kv_tokens = sum(keys.shape[0] for keys, _ in drawn.histories) + rows  # read; the new ones are written as well
    inputs = rows * (8 + 2 * half * sizes.hidden_size)  # ids, their embeddings, hidden states
    outputs = head_rows * (single * sizes.vocab_size + half * sizes.hidden_size)
    topk = head_rows * 12 if form is DraftExtendOutput.ALL_ROWS_WITH_TOPK else 0
    weights = half * (sizes.layer_parameters + sizes.head_parameters)
    return weights + half * 2 * sizes.kv_size * (kv_tokens + rows) + inputs + outputs + topk


def pass_operations(sizes: StandInSizes, drawn: StandInPass, form: DraftExtendOutput) -> int:
    rows, head_rows = sum(drawn.q_lens), _head_rows(drawn, form)
    prefix_lens = tuple(keys.shape[0] for keys, _ in drawn.histories)
    attention = ForwardCase(drawn.batch.forward_mode, sizes.geometry_name, prefix_lens, drawn.q_lens).operations
    return 2 * (rows * sizes.layer_parameters + head_rows * sizes.head_parameters) + attention


def _head_rows(drawn: StandInPass, form: DraftExtendOutput) -> int:
    return form.num_rows(len(drawn.q_lens), sum(drawn.q_lens))


@dataclass(frozen=True, eq=False)
class ModelWorks:
    """Timed work of one pass of a stand-in model. `truth` has the expected results, and `graphs` the captured mode."""

    model: StandInModel
    backend: TRTLLMMHABackend
    drawn: StandInPass
    graphs: GraphMode
    truth: StandInTruth

    @classmethod
    def of(cls, model: StandInModel, backend: TRTLLMMHABackend, drawn: StandInPass, width: int) -> "ModelWorks":
        """Make the timed work of a pass. Requests have up to `width` query rows in modes that allow more than one."""
        mode = drawn.batch.forward_mode
        graphs = GraphMode(mode, 1 if mode.query_rows is QueryRows.ONE else width)
        return cls(model, backend, drawn, graphs, truth_of_pass(model, drawn))

    def graph(self, form: DraftExtendOutput) -> GpuWork:
        """Return the timed work of a CUDA graph: it writes the metadata in one launch, and runs the model."""
        size = self.drawn.batch.batch_size
        static = StaticInputs(self.graphs, size, self.model.pool.device)
        static.load(self.drawn.batch, size)
        inputs, outputs = self._buffers(form)

        def prepare(
            static: StaticInputs, metadata: MHAGraphMetadata, inputs: DraftInputs, outputs: DraftOutputs
        ) -> Call:
            view = static.view(size)
            rebuild = metadata.prepare(view)
            run = model_body(self.backend, self.model, inputs, outputs, form)(view, metadata.slices(size))

            def whole() -> object:
                rebuild()
                return run()

            return whole

        metadata = MHAGraphMetadata(self.graphs, self.model.pool, size)
        return self._work(form, prepare, static=static, metadata=metadata, inputs=inputs, outputs=outputs)

    def eager(self, form: DraftExtendOutput) -> GpuWork:
        """Return the timed work of a pass without a CUDA graph: build the metadata, prepare attention, run the model."""
        batch, model = self.drawn.batch, self.model
        inputs = model.new_inputs(batch.batch_size, batch.num_tokens)
        inputs.load(self.drawn.input_ids, self.drawn.hidden_states, self._select_index(form))
        outputs = model.new_outputs(form, batch.batch_size, batch.num_tokens)

        def prepare(inputs: DraftInputs, outputs: DraftOutputs) -> Call:
            def run() -> object:
                metadata = build_mha_metadata(batch, model.pool)
                return model.prepare(self.backend, batch, metadata, inputs, outputs, form)()

            return run

        return self._work(form, prepare, inputs=inputs, outputs=outputs)

    def load(self) -> GpuWork:
        """Return the timed work of copying a batch into a graph's inputs, which precedes each replay."""
        drawn, batch = self.drawn, self.drawn.batch
        size = batch.batch_size
        static = StaticInputs(self.graphs, size, self.model.pool.device)
        inputs = self.model.new_inputs(size, size * self.graphs.num_tokens_per_req)
        given = (batch.seq_lens, batch.req_pool_indices, batch.out_cache_loc, drawn.input_ids, drawn.hidden_states)

        def load(static: StaticInputs, inputs: DraftInputs) -> None:
            static.load(batch, size)
            inputs.load(drawn.input_ids, drawn.hidden_states)

        return GpuWork.of(load, 2 * sum(tensor.nbytes for tensor in given), static=static, inputs=inputs)

    def replay(self, form: DraftExtendOutput) -> tuple[Call, DraftOutputs]:
        """Return (call that copies a batch to a graph's inputs and replays the graph, outputs that the graph writes)."""
        drawn = self.drawn
        inputs, outputs = self._buffers(form)
        body = model_body(self.backend, self.model, inputs, outputs, form)
        runner = GraphRunner(self.backend, self.graphs, self.model.pool, [drawn.batch.batch_size], body)

        def replay() -> object:
            inputs.load(drawn.input_ids, drawn.hidden_states)
            return runner.replay(drawn.batch)

        return replay, outputs

    def hold(self, outputs: DraftOutputs, form: DraftExtendOutput) -> None:
        self.truth.hold(outputs.first(_head_rows(self.drawn, form)), form)

    def _work(self, form: DraftExtendOutput, prepare: Callable[..., Call], **arguments: Any) -> GpuWork:
        def check(given: Mapping[str, Any]) -> None:
            outputs: DraftOutputs = given["outputs"]
            self.hold(outputs, form)
            outputs.logits.fill_(float("nan"))
            outputs.hidden_states.fill_(float("nan"))

        sizes = self.model.sizes
        moved, operations = pass_bytes(sizes, self.drawn, form), pass_operations(sizes, self.drawn, form)
        return GpuWork(prepare, arguments, moved, operations, check)

    def _buffers(self, form: DraftExtendOutput) -> tuple[DraftInputs, DraftOutputs]:
        size, drawn = self.drawn.batch.batch_size, self.drawn
        inputs = self.model.new_inputs(size, size * self.graphs.num_tokens_per_req)
        inputs.load(drawn.input_ids, drawn.hidden_states, self._select_index(form))
        return inputs, self.model.new_outputs(form, size, size * self.graphs.num_tokens_per_req)

    def _select_index(self, form: DraftExtendOutput) -> torch.Tensor | None:
        if form is not DraftExtendOutput.SELECTED_ROW:
            return None
        return selected_rows(self.drawn.accept_lens, self.drawn.q_lens[0])
