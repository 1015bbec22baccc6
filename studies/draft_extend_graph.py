"""What does a CUDA graph save around a draft model's pass, and what do the trimmed outputs of its draft extend save (25002)?

    lab experiments draft-extend-graph --out draft_extend_graph.json
    lab experiments draft-extend-graph --batch-sizes 1,64 --num-draft-tokens 4 --out draft_extend_graph.json

The model is a stand-in: one attention layer between a QKV projection and an LM head over 128,256 tokens. Its cache is written
by torch's indexing, in about ten launches where an engine has one.

Modes. Each mode that has a graph (decode, verify, draft extend v1 on the context call, V2 on the decode call) runs eagerly and
in a graph. The GPU's time is that of the kernels, both recorded in a graph; so it does not see what a graph is for. The host's
time does, and the time from the call to an idle GPU, in which the launches of an eager pass show wherever they take longer than
its kernels. Copying a batch into the graph's inputs is timed on its own, and is in the host's times of a replay.

Outputs. The draft extend V2 with logits of all rows, with a top-k besides, and of the selected row alone.

Everything of a point takes turns in one process. L2 is warm: the LM head, a gigabyte, is far larger. The floor counts the
weights, the visible keys and values and the new ones, the inputs, and the outputs: each byte once, intermediates not at all.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.table import Table

from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.speculation.draft_extend_graph import DraftExtendOutput
from lab.timing.gpu_time import rounded_us
from lab.timing.host_time import CALLS_PER_BATCH, drain, host_time
from lab.timing.host_time import METHOD as HOST_METHOD
from lab.timing.work import GpuWork
from lab.workloads.requests import new_pool
from studies.arms import Arm, Point, TimingPlan, measure_all
from studies.model_pass import ModelWorks
from studies.recording import Columns, Row, rows_by_point, table_of
from studies.stand_in_model import GRAPH_MODES, LLAMA_8B_SIZES, StandInModel, StandInPass, StandInSizes, draw_pass

COMPLETION_METHOD = "perf_counter from the call to an idle GPU, each call on an idle GPU, all calls in turn"
COMPLETION_SAMPLES = 100
MODES_WIDTH = 4  # query rows per request where modes are compared
PAGE_SIZE = 64
# Launches of one batch of host times: fewer than the driver queues, about a thousand, before one has to wait for the GPU.
MOST_QUEUED_LAUNCHES = 500
ALL_ROWS = DraftExtendOutput.ALL_ROWS


def new_model(sizes: StandInSizes, max_batch_size: int, max_kv_len: int, device: torch.device) -> StandInModel:
    """Make a model, and a pool with room for so many requests of so many tokens, this pass's included."""
    lens = (max_kv_len,) * max_batch_size
    return StandInModel(sizes, new_pool(lens, page_size=PAGE_SIZE, max_context_len=max_kv_len, device=device))


def draw(model: StandInModel, mode: ForwardMode, batch_size: int, width: int, kv_len: int) -> StandInPass:
    """Draw a pass of equal requests with `kv_len` tokens, this pass's included; v1's requests accepted 1, 2, … width tokens."""
    q_lens = [_rows(mode, width)] * batch_size
    if mode.query_rows is QueryRows.ACCEPTED:
        q_lens = [1 + request % width for request in range(batch_size)]
    return draw_pass(model, mode, [kv_len - q_len for q_len in q_lens], q_lens)


def _rows(mode: ForwardMode, width: int) -> int:
    return 1 if mode.query_rows is QueryRows.ONE else width


def free(model: StandInModel, drawn: StandInPass) -> None:
    """Give the requests of a pass back to the pool."""
    for row in drawn.batch.req_pool_indices.tolist():
        model.pool.free_request(row)


def completion_times_us(
    calls: Mapping[str, Callable[[], object]], samples: int = COMPLETION_SAMPLES
) -> dict[str, list[float]]:
    """Take samples of the time of each call, in µs, until the GPU is idle again; see `COMPLETION_METHOD`."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            drain()
            start_ns = time.perf_counter_ns()
            call()
            drain()
            taken[name].append((time.perf_counter_ns() - start_ns) / 1000)
    return taken


def measure_mode(
    model: StandInModel, backend: TRTLLMMHABackend, mode: ForwardMode, batch_size: int, kv_len: int, plan: TimingPlan
) -> list[Row]:
    """Measure a mode eagerly and in a graph, and the copies before a replay.

    Returns:
        Rows with the GPU times of all three; those of the first two have host and completion times as well.

    Raises:
        PointFailedError: an arm could not be measured, or is wrong.
    """
    drawn = draw(model, mode, batch_size, MODES_WIDTH, kv_len)
    made = ModelWorks.of(model, backend, drawn, MODES_WIDTH)
    works = {"eager": made.eager(ALL_ROWS), "graph": made.graph(ALL_ROWS), "load": made.load()}
    point = _point(mode, batch_size, MODES_WIDTH, kv_len, works)
    rows = measure_all(point, lambda arms: works, plan, _work_facts)
    host = _host_times(made, works["eager"], next(row["launches"] for row in rows if row["arm"] == "eager"))
    free(model, drawn)
    return [row | host.get(row["arm"], {}) for row in rows]


def _host_times(made: ModelWorks, eager: GpuWork, eager_launches: int) -> dict[str, Row]:
    """Take host and completion times of an eager pass and of a replay with its copies, in turns; both are judged after."""
    replay, outputs = made.replay(ALL_ROWS)
    calls = {"eager": eager.call(), "graph": replay}
    per_batch = max(1, min(CALLS_PER_BATCH, MOST_QUEUED_LAUNCHES // eager_launches))
    host = host_time(calls, calls_per_batch=per_batch)
    completion_us = completion_times_us(calls)
    for written in (outputs, eager.arguments["outputs"]):
        made.hold(written, ALL_ROWS)
    return {
        arm: host[arm].facts()
        | {"completion_us": round(statistics.median(completion_us[arm]), 2)}
        | {"completion_samples_us": rounded_us(completion_us[arm])}
        for arm in calls
    }


def measure_forms(
    model: StandInModel, backend: TRTLLMMHABackend, batch_size: int, width: int, kv_len: int, plan: TimingPlan
) -> list[Row]:
    """Measure the draft extend V2 with each form of output, in turns.

    Raises:
        PointFailedError: a form could not be measured, or is wrong.
    """
    mode = ForwardMode.DRAFT_EXTEND_V2
    drawn = draw(model, mode, batch_size, width, kv_len)
    made = ModelWorks.of(model, backend, drawn, width)
    works = {form.value: made.graph(form) for form in DraftExtendOutput}
    point = _point(mode, batch_size, width, kv_len, works)
    rows = measure_all(point, lambda arms: works, plan, _form_facts)
    free(model, drawn)
    return rows


def _point(mode: ForwardMode, batch_size: int, width: int, kv_len: int, works: Mapping[str, GpuWork]) -> Point:
    tokens = _rows(mode, width)
    facts = {"mode": mode.name.lower(), "batch_size": batch_size, "num_draft_tokens": tokens, "kv_len": kv_len}
    return Point(f"{facts['mode']}, {batch_size} x {tokens}", tuple(Arm(name, facts["mode"]) for name in works), facts)


def _work_facts(arm: Arm, work: GpuWork) -> Row:
    return {"bytes_moved": work.bytes_moved, "operations": work.operations}


def _form_facts(arm: Arm, work: GpuWork) -> Row:
    return {"form": arm.name, "logits_bytes": work.arguments["outputs"].logits.nbytes, **_work_facts(arm, work)}


FORM_POINT = ("batch_size", "num_draft_tokens")


def savings(form_rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, per point, what each form takes and what it costs over the selected row: GPU time in µs, of medians."""
    found = []
    for point, forms in rows_by_point(form_rows, FORM_POINT, "form").items():
        selected, plain, topk = (
            forms[form.value]["median_us"]
            for form in (DraftExtendOutput.SELECTED_ROW, ALL_ROWS, DraftExtendOutput.ALL_ROWS_WITH_TOPK)
        )
        found.append(
            dict(zip(FORM_POINT, point, strict=True))
            | {
                "selected_row_us": selected,
                "other_rows_cost_us": round(plain - selected, 3),
                "dead_topk_cost_us": round(topk - plain, 3),
                "saved_percent": round(100 * (topk - selected) / topk, 1),
            }
        )
    return found


MODE_COLUMNS: Columns = {  # of the rows of a mode and batch size, by arm
    "mode": "{eager[mode]}",
    "requests": "{eager[batch_size]}",
    "GPU eager, µs": "{eager[median_us]:,.1f}",
    "graph, µs": "{graph[median_us]:,.1f}",
    "floor, µs": "{graph[floor_us]:,.1f}",
    "copies, µs": "{load[median_us]:,.1f}",
    "launches eager": "{eager[launches]}",
    "graph": "{graph[launches]}",
    "copies": "{load[launches]}",
    "host eager, µs": "{eager[host_us]:,.1f}",
    "replay, µs": "{graph[host_us]:,.1f}",
    "completion eager, µs": "{eager[completion_us]:,.1f}",
    "replay completion, µs": "{graph[completion_us]:,.1f}",
}


def mode_table(rows: Sequence[Mapping[str, Any]], method: str) -> Table:
    """Draw one line per mode and batch size."""
    points = rows_by_point(rows, ("mode", "batch_size"), "arm")
    return table_of(f"Eager against graph; GPU time by {method}", MODE_COLUMNS, points.values(), words=("mode",))


FORM_COLUMNS: Columns = {  # of the rows of a point, by form, and its savings
    "requests": "{batch_size}",
    "draft tokens": "{num_draft_tokens}",
    **{form.value: f"{{{form.value}[median_us]:,.1f}} ({{{form.value}[floor_us]:,.1f}})" for form in DraftExtendOutput},
    "other rows cost": "{other_rows_cost_us:,.1f}",
    "dead top-k costs": "{dead_topk_cost_us:,.1f}",
    "saved, %": "{saved_percent:,.1f}",
}


def form_table(rows: Sequence[Mapping[str, Any]], method: str) -> Table:
    """Draw one line per point."""
    points = rows_by_point(rows, FORM_POINT, "form").values()
    found = [forms | saved for forms, saved in zip(points, savings(rows), strict=True)]
    return table_of(f"Draft extend V2, GPU time in µs (floor) by {method}", FORM_COLUMNS, found)


def check_kv_len(kv_len: int, num_draft_tokens: Sequence[int]) -> None:
    """Refuse fewer tokens than are new.

    Raises:
        ValueError: there are.
    """
    new_tokens = max(*num_draft_tokens, MODES_WIDTH)
    if kv_len < new_tokens:
        raise ValueError(f"--kv-len {kv_len} counts the new tokens, and there are {new_tokens} of them")


def run(
    batch_sizes: Sequence[int],
    num_draft_tokens: Sequence[int],
    kv_len: int,
    implementation: ModuleType,
    plan: TimingPlan,
    out: Path | None = None,
) -> int:
    """Measure both tables; see `studies`.

    Args:
        batch_sizes: requests of each point.
        num_draft_tokens: query rows of each request, where outputs are compared.
        kv_len: tokens of each request, the new ones included.
        implementation: has FlashInfer's names.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    backend = TRTLLMMHABackend(implementation)
    model = new_model(LLAMA_8B_SIZES, max(batch_sizes), kv_len, device)
    recording = plan.recording(
        "draft_extend_graph",
        out,
        ("modes", "forms"),
        host_method=HOST_METHOD,
        completion_method=COMPLETION_METHOD,
        implementation=implementation.__name__,
        model=asdict(LLAMA_8B_SIZES) | {"page_size": PAGE_SIZE},
        savings=lambda result: savings(result["forms"]),
    )
    modes, forms = list(product(GRAPH_MODES, batch_sizes)), list(product(batch_sizes, num_draft_tokens))
    recording.measure(modes, lambda point: {"modes": measure_mode(model, backend, *point, kv_len, plan)}, "modes")
    recording.measure(forms, lambda point: {"forms": measure_forms(model, backend, *point, kv_len, plan)}, "outputs")
    for table_from, rows in ((mode_table, "modes"), (form_table, "forms")):
        recording.console.print(table_from(recording.result[rows], str(plan.method)))
    return recording.exit_status
