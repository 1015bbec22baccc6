"""What does a CUDA graph save around a draft model's pass, and what do the trimmed outputs of its draft extend save (25002)?

    python -m lab.experiments.draft_extend_graph --out draft_extend_graph.json
    python -m lab.experiments.draft_extend_graph --batch-sizes 1 64 --num-draft-tokens 4 --out draft_extend_graph.json

The model is a stand-in: one attention layer between a QKV projection and an LM head over 128,256 tokens. Its cache is written
by torch's indexing, in about ten launches where an engine has one.

Modes. Each mode that has a graph (decode, verify, draft extend v1 on the context call, V2 on the decode call) runs eagerly and
in a graph. The GPU's time is that of the kernels, both recorded in a graph; so it does not see what a graph is for. The host's
time does, and the time from the call to an idle GPU, in which the launches of an eager pass show wherever they take longer than
its kernels. Copying a batch into the graph's inputs is timed on its own, and is in the host's times of a replay.

Outputs. The draft extend V2 with logits of all rows, with a top-k besides, and of the selected row alone.

Everything of a point takes turns in one process. L2 is warm: the LM head, a gigabyte, is far larger. Each output is judged
before and after by the requests' histories. The floor counts the weights, the visible keys and values and the new ones, the
inputs, and the outputs: each byte once, intermediates not at all. Exit status: 2 without a GPU.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from lab.checks.stand_in_model import StandInTruth, truth_of_pass
from lab.experiments.recording import NO_GPU, Recording, ceilings_of_gpu, gpu_is_here
from lab.kernels import default_implementation
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.forward_batch import SpecInfo
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.graph_inputs import GraphMode, StaticInputs
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.buffers import MHAGraphMetadata
from lab.metadata.mha.metadata import build_mha_metadata
from lab.metadata.speculation.draft_extend_graph import (
    DraftExtendOutput,
    DraftInputs,
    DraftOutputs,
    model_body,
    selected_rows,
)
from lab.timing.forward import time_facts
from lab.timing.gpu_time import SAMPLES, GpuTime, measure_interleaved
from lab.timing.host_time import CALLS_PER_BATCH, host_time
from lab.timing.host_time import METHOD as HOST_METHOD
from lab.timing.method import L2, Clock, Method
from lab.timing.roofline import Ceilings
from lab.timing.work import Call, GpuWork
from lab.workloads.forward_case import ForwardCase
from lab.workloads.stand_in_model import GRAPH_MODES, LLAMA_8B_SIZES, StandInModel, StandInPass, StandInSizes, draw_pass

METHOD = Method(Clock.GRAPH, L2.WARM)
COMPLETION_METHOD = "perf_counter from the call to an idle GPU, each call on an idle GPU, all calls in turn"
COMPLETION_SAMPLES = 100
BATCH_SIZES = (1, 8, 32, 64)
NUM_DRAFT_TOKENS = (2, 4, 8)
MODES_WIDTH = 4  # query rows per request where modes are compared
KV_LEN = 4096
PAGE_SIZE = 64
# Launches of one batch of host times: fewer than the driver queues, about a thousand, before one has to wait for the GPU.
MOST_QUEUED_LAUNCHES = 500


def new_model(sizes: StandInSizes, max_batch_size: int, max_kv_len: int, device: torch.device) -> StandInModel:
    """A model, and a pool with room for so many requests of so many tokens, this pass's included."""
    pages = max_batch_size * -(-max_kv_len // PAGE_SIZE)
    pool = KVPool(
        num_requests=max_batch_size,
        max_context_len=max_kv_len,
        page_size=PAGE_SIZE,
        num_pages=pages + 1,
        device=device,
    )
    return StandInModel(sizes, pool)


def draw(model: StandInModel, mode: ForwardMode, batch_size: int, width: int, kv_len: int) -> StandInPass:
    """A pass of equal requests with `kv_len` tokens, this pass's included; v1's requests accepted 1, 2, … width tokens."""
    q_lens = [1 if mode.is_decode() else width] * batch_size
    if mode is ForwardMode.DRAFT_EXTEND:
        q_lens = [1 + request % width for request in range(batch_size)]
    return draw_pass(model, mode, [kv_len - q_len for q_len in q_lens], q_lens)


def free(model: StandInModel, drawn: StandInPass) -> None:
    """Give the requests of a pass back to the pool."""
    for row in drawn.batch.req_pool_indices.tolist():
        model.pool.free_request(row)


def graph_mode(mode: ForwardMode, width: int) -> GraphMode:
    """The graphs that a mode's passes run in."""
    if mode.is_decode():
        return GraphMode.decode()
    if mode.is_target_verify():
        return GraphMode.target_verify(width)
    if mode.is_draft_extend_v2():
        return GraphMode.draft_extend_v2(SpecInfo(num_tokens_per_req=width))
    return GraphMode.draft_extend(width)


def pass_bytes(sizes: StandInSizes, drawn: StandInPass, form: DraftExtendOutput) -> int:
    """Bytes that a pass must move at least once: see the module."""
    rows, head_rows = sum(drawn.q_lens), form.num_rows(len(drawn.q_lens), sum(drawn.q_lens))
    half, single = 2, 4  # bytes of bf16 and float32
    kv_tokens = sum(keys.shape[0] for keys, _ in drawn.histories) + rows  # read; the new ones are written as well
    inputs = rows * (8 + 2 * half * sizes.hidden_size)  # ids, their embeddings, hidden states
    outputs = head_rows * (single * sizes.vocab_size + half * sizes.hidden_size)
    topk = head_rows * 12 if form is DraftExtendOutput.ALL_ROWS_WITH_TOPK else 0
    weights = half * (sizes.layer_parameters + sizes.head_parameters)
    return weights + half * 2 * sizes.kv_size * (kv_tokens + rows) + inputs + outputs + topk


def pass_operations(sizes: StandInSizes, drawn: StandInPass, form: DraftExtendOutput) -> int:
    """Floating-point operations of its products."""
    rows, head_rows = sum(drawn.q_lens), form.num_rows(len(drawn.q_lens), sum(drawn.q_lens))
    prefix_lens = tuple(keys.shape[0] for keys, _ in drawn.histories)
    attention = ForwardCase(drawn.batch.forward_mode, sizes.geometry_name, prefix_lens, drawn.q_lens).operations
    return 2 * (rows * sizes.layer_parameters + head_rows * sizes.head_parameters) + attention


def graph_work(
    model: StandInModel,
    backend: TRTLLMMHABackend,
    drawn: StandInPass,
    mode: GraphMode,
    form: DraftExtendOutput,
    truth: StandInTruth,
) -> GpuWork:
    """What a graph of the pass holds: its metadata, rebuilt in one launch, and the model."""
    batch = drawn.batch
    size = batch.batch_size
    static = StaticInputs(mode, size, model.pool.device)
    static.load(batch, size)
    inputs, outputs = _buffers(model, drawn, mode, form)

    def prepare(
        static: StaticInputs, metadata: MHAGraphMetadata, inputs: DraftInputs, outputs: DraftOutputs
    ) -> Callable[[], object]:
        view = static.view(size)
        rebuild = metadata.prepare(view)
        run = model_body(backend, model, inputs, outputs, form)(view, metadata.slices(size))

        def whole() -> object:
            rebuild()
            return run()

        return whole

    arguments = {
        "static": static,
        "metadata": MHAGraphMetadata(mode, model.pool, size),
        "inputs": inputs,
        "outputs": outputs,
    }
    return _work(model, drawn, form, truth, prepare, arguments)


def eager_work(
    model: StandInModel,
    backend: TRTLLMMHABackend,
    drawn: StandInPass,
    form: DraftExtendOutput,
    truth: StandInTruth,
) -> GpuWork:
    """The pass as it runs without a graph: metadata in torch operations, attention prepared anew, the model."""
    batch = drawn.batch
    inputs = model.new_inputs(batch.batch_size, batch.num_tokens)
    inputs.load(drawn.input_ids, drawn.hidden_states, _select_index(drawn, form))
    outputs = model.new_outputs(form, batch.batch_size, batch.num_tokens)

    def prepare(inputs: DraftInputs, outputs: DraftOutputs) -> Callable[[], object]:
        def run() -> object:
            metadata = build_mha_metadata(batch, model.pool)
            return model.prepare(backend, batch, metadata, inputs, outputs, form)()

        return run

    return _work(model, drawn, form, truth, prepare, {"inputs": inputs, "outputs": outputs})


def load_work(model: StandInModel, drawn: StandInPass, mode: GraphMode) -> GpuWork:
    """The copies of a batch into a graph's inputs, which go before each replay."""
    batch = drawn.batch
    size = batch.batch_size
    static = StaticInputs(mode, size, model.pool.device)
    inputs = model.new_inputs(size, size * mode.num_tokens_per_req)
    given = (batch.seq_lens, batch.req_pool_indices, batch.out_cache_loc, drawn.input_ids, drawn.hidden_states)

    def load(static: StaticInputs, inputs: DraftInputs) -> None:
        static.load(batch, size)
        inputs.load(drawn.input_ids, drawn.hidden_states)

    moved = 2 * sum(tensor.nbytes for tensor in given)
    return GpuWork.of(load, moved, static=static, inputs=inputs)


def _work(
    model: StandInModel,
    drawn: StandInPass,
    form: DraftExtendOutput,
    truth: StandInTruth,
    prepare: Callable[..., Call],
    arguments: dict[str, Any],
) -> GpuWork:
    rows = form.num_rows(len(drawn.q_lens), sum(drawn.q_lens))

    def check(given: Mapping[str, Any]) -> None:
        outputs: DraftOutputs = given["outputs"]
        truth.hold(outputs.first(rows), form)
        outputs.logits.fill_(float("nan"))
        outputs.hidden_states.fill_(float("nan"))

    moved, operations = pass_bytes(model.sizes, drawn, form), pass_operations(model.sizes, drawn, form)
    return GpuWork(prepare, arguments, moved, operations, check)


def _buffers(
    model: StandInModel, drawn: StandInPass, mode: GraphMode, form: DraftExtendOutput
) -> tuple[DraftInputs, DraftOutputs]:
    size = drawn.batch.batch_size
    inputs = model.new_inputs(size, size * mode.num_tokens_per_req)
    inputs.load(drawn.input_ids, drawn.hidden_states, _select_index(drawn, form))
    return inputs, model.new_outputs(form, size, size * mode.num_tokens_per_req)


def _select_index(drawn: StandInPass, form: DraftExtendOutput) -> torch.Tensor | None:
    if form is not DraftExtendOutput.SELECTED_ROW:
        return None
    return selected_rows(drawn.accept_lens, drawn.q_lens[0])


def replay_call(
    model: StandInModel, backend: TRTLLMMHABackend, drawn: StandInPass, mode: GraphMode, form: DraftExtendOutput
) -> tuple[Callable[[], object], DraftOutputs]:
    """One iteration with a graph, the copies into its inputs included; and where it writes."""
    batch = drawn.batch
    inputs, outputs = _buffers(model, drawn, mode, form)
    body = model_body(backend, model, inputs, outputs, form)
    runner = GraphRunner(backend, mode, model.pool, [batch.batch_size], body)

    def replay() -> object:
        inputs.load(drawn.input_ids, drawn.hidden_states)
        return runner.replay(batch)

    return replay, outputs


def completion_times_us(
    calls: Mapping[str, Callable[[], object]], device: torch.device, samples: int = COMPLETION_SAMPLES
) -> dict[str, float]:
    """Median time of each call in µs until the GPU is idle again; see `COMPLETION_METHOD`."""

    def drain() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            drain()
            start_ns = time.perf_counter_ns()
            call()
            drain()
            taken[name].append((time.perf_counter_ns() - start_ns) / 1000)
    return {name: statistics.median(times) for name, times in taken.items()}


def measure_mode(
    model: StandInModel,
    backend: TRTLLMMHABackend,
    mode: ForwardMode,
    batch_size: int,
    kv_len: int,
    ceilings: Ceilings,
    samples: int = SAMPLES,
) -> list[dict[str, Any]]:
    """A mode eagerly and in a graph, and the copies before a replay: GPU times of all three, host times of the first two."""
    form = DraftExtendOutput.ALL_ROWS
    drawn = draw(model, mode, batch_size, MODES_WIDTH, kv_len)
    truth = truth_of_pass(model, drawn)
    graphs = graph_mode(mode, MODES_WIDTH)
    works = {
        "eager": eager_work(model, backend, drawn, form, truth),
        "graph": graph_work(model, backend, drawn, graphs, form, truth),
        "load": load_work(model, drawn, graphs),
    }
    times = measure_interleaved(works, METHOD, samples)
    host = _host_times(model, backend, drawn, graphs, form, truth, works["eager"], times["eager"])
    free(model, drawn)
    shared = _shared_facts(mode, batch_size, MODES_WIDTH, kv_len)
    return [
        shared
        | {"arm": arm, "bytes_moved": work.bytes_moved, "operations": work.operations}
        | time_facts(times[arm], ceilings, work.bytes_moved, work.operations)
        | host.get(arm, {})
        for arm, work in works.items()
    ]


def _host_times(
    model: StandInModel,
    backend: TRTLLMMHABackend,
    drawn: StandInPass,
    mode: GraphMode,
    form: DraftExtendOutput,
    truth: StandInTruth,
    eager: GpuWork,
    eager_time: GpuTime,
) -> dict[str, dict[str, float]]:
    """Host and completion times of an eager pass and of a replay with its copies, in turns; both judged behind."""
    replay, outputs = replay_call(model, backend, drawn, mode, form)
    calls = {"eager": eager.call(), "graph": replay}
    per_batch = max(1, min(CALLS_PER_BATCH, MOST_QUEUED_LAUNCHES // eager_time.launches))
    host = host_time(calls, calls_per_batch=per_batch)
    completion_us = completion_times_us(calls, model.pool.device)
    rows = form.num_rows(len(drawn.q_lens), sum(drawn.q_lens))
    for written in (outputs, eager.arguments["outputs"]):
        truth.hold(written.first(rows), form)
    return {
        arm: {"host_us": round(host[arm].median_us, 2), "completion_us": round(completion_us[arm], 2)} for arm in calls
    }


def measure_forms(
    model: StandInModel,
    backend: TRTLLMMHABackend,
    batch_size: int,
    width: int,
    kv_len: int,
    ceilings: Ceilings,
    samples: int = SAMPLES,
) -> list[dict[str, Any]]:
    """The draft extend V2 with each form of output, in turns."""
    mode = ForwardMode.DRAFT_EXTEND_V2
    drawn = draw(model, mode, batch_size, width, kv_len)
    truth = truth_of_pass(model, drawn)
    graphs = graph_mode(mode, width)
    works = {form: graph_work(model, backend, drawn, graphs, form, truth) for form in DraftExtendOutput}
    times = measure_interleaved({form.value: work for form, work in works.items()}, METHOD, samples)
    free(model, drawn)
    shared = _shared_facts(mode, batch_size, width, kv_len)
    return [
        shared
        | {"form": form.value, "logits_bytes": work.arguments["outputs"].logits.nbytes}
        | {"bytes_moved": work.bytes_moved, "operations": work.operations}
        | time_facts(times[form.value], ceilings, work.bytes_moved, work.operations)
        for form, work in works.items()
    ]


def _shared_facts(mode: ForwardMode, batch_size: int, width: int, kv_len: int) -> dict[str, Any]:
    return {
        "mode": mode.name.lower(),
        "batch_size": batch_size,
        "num_draft_tokens": 1 if mode.is_decode() else width,
        "kv_len": kv_len,
    }


def savings(form_rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per point, what each form takes and what it costs over the selected row: GPU time in µs, of the measured medians."""
    points = dict.fromkeys((row["batch_size"], row["num_draft_tokens"]) for row in form_rows)
    found = []
    for batch_size, width in points:
        times_us = {
            row["form"]: row["median_us"]
            for row in form_rows
            if (row["batch_size"], row["num_draft_tokens"]) == (batch_size, width)
        }
        selected, plain, topk = (
            times_us[form.value]
            for form in (
                DraftExtendOutput.SELECTED_ROW,
                DraftExtendOutput.ALL_ROWS,
                DraftExtendOutput.ALL_ROWS_WITH_TOPK,
            )
        )
        found.append(
            {
                "batch_size": batch_size,
                "num_draft_tokens": width,
                "selected_row_us": selected,
                "other_rows_cost_us": round(plain - selected, 3),
                "dead_topk_cost_us": round(topk - plain, 3),
                "saved_percent": round(100 * (topk - selected) / topk, 1),
            }
        )
    return found


def mode_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per mode and batch size."""
    table = Table(title=f"Eager against graph; GPU time by {METHOD}", title_justify="left")
    headers = ("mode", "requests", "GPU eager, µs", "graph", "floor", "copies", "launches eager", "graph", "copies")
    for header in (*headers, "host eager, µs", "replay", "completion eager, µs", "replay"):
        table.add_column(header, justify="left" if header == "mode" else "right")
    for mode, size in dict.fromkeys((row["mode"], row["batch_size"]) for row in rows):
        arms = {row["arm"]: row for row in rows if (row["mode"], row["batch_size"]) == (mode, size)}
        eager, graph, load = arms["eager"], arms["graph"], arms["load"]
        gpu_us = (eager["median_us"], graph["median_us"], graph["floor_us"], load["median_us"])
        host_us = (eager["host_us"], graph["host_us"], eager["completion_us"], graph["completion_us"])
        launches = (eager["launches"], graph["launches"], load["launches"])
        table.add_row(
            mode,
            str(size),
            *(f"{value:,.1f}" for value in gpu_us),
            *map(str, launches),
            *(f"{v:,.1f}" for v in host_us),
        )
    return table


def form_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per point."""
    table = Table(title=f"Draft extend V2, GPU time in µs (floor) by {METHOD}", title_justify="left")
    headers = [form.value for form in DraftExtendOutput]
    for header in ("requests", "draft tokens", *headers, "other rows cost", "dead top-k costs", "saved, %"):
        table.add_column(header, justify="right")
    for saved in savings(rows):
        point = (saved["batch_size"], saved["num_draft_tokens"])
        forms = {row["form"]: row for row in rows if (row["batch_size"], row["num_draft_tokens"]) == point}
        table.add_row(
            *map(str, point),
            *(f"{forms[name]['median_us']:,.1f} ({forms[name]['floor_us']:,.1f})" for name in headers),
            *(f"{saved[name]:,.1f}" for name in ("other_rows_cost_us", "dead_topk_cost_us", "saved_percent")),
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    given = _arguments(argv)
    if not gpu_is_here():
        return NO_GPU
    device = torch.device("cuda", torch.cuda.current_device())
    implementation = importlib.import_module(given.implementation or default_implementation(device).__name__)
    backend = TRTLLMMHABackend(implementation)
    ceilings = ceilings_of_gpu()
    sizes = LLAMA_8B_SIZES
    model = new_model(sizes, max(given.batch_sizes), given.kv_len, device)
    facts = {
        "method": str(METHOD),
        "host_method": HOST_METHOD,
        "completion_method": COMPLETION_METHOD,
        "implementation": implementation.__name__,
        "model": asdict(sizes) | {"page_size": PAGE_SIZE},
    }
    recording = Recording(
        given.out,
        facts,
        ("modes", "forms"),
        ceilings=ceilings,
        derived={"savings": lambda result: savings(result["forms"])},
    )

    def modes_at(point: tuple[ForwardMode, int]) -> Mapping[str, Sequence[dict[str, Any]]]:
        return {"modes": measure_mode(model, backend, *point, given.kv_len, ceilings, given.samples)}

    def forms_at(point: tuple[int, int]) -> Mapping[str, Sequence[dict[str, Any]]]:
        return {"forms": measure_forms(model, backend, *point, given.kv_len, ceilings, given.samples)}

    recording.measure(list(product(GRAPH_MODES, given.batch_sizes)), modes_at, "modes")
    recording.measure(list(product(given.batch_sizes, given.num_draft_tokens)), forms_at, "outputs")
    recording.console.print(mode_table(recording.result["modes"]))
    recording.console.print(form_table(recording.result["forms"]))
    return recording.exit_status


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.draft_extend_graph", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES))
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=list(NUM_DRAFT_TOKENS))
    parser.add_argument("--kv-len", type=int, default=KV_LEN, help="tokens of each request, the new ones included")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each GPU time")
    parser.add_argument("--implementation", help="a module with FlashInfer's names; what fits the GPU if left out")
    given = parser.parse_args(argv)
    if min(*given.batch_sizes, *given.num_draft_tokens, given.samples) < 1:
        parser.error("batch sizes, draft tokens and samples must be at least 1")
    if given.kv_len < max(*given.num_draft_tokens, MODES_WIDTH):
        parser.error(f"--kv-len {given.kv_len} counts the new tokens, and there are more of them")
    return given


if __name__ == "__main__":
    sys.exit(main())
