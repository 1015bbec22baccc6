"""How much time does a CUDA graph of a draft model's pass save, and how much do fewer outputs of its draft extend save
(SGLang's PR 25002)?

    lab experiments draft-extend-graph --out draft_extend_graph.json
    lab experiments draft-extend-graph --batch-sizes 1,64 --num-draft-tokens 4 --out draft_extend_graph.json

The model is a stand-in: one attention layer between a QKV projection and an LM head over 128,256 tokens. Its cache is written
by torch's indexing, in about ten launches where an engine has one.

Modes. Each mode that has a graph (decode, verify, draft extend v1 on the context call, V2 on the decode call) runs eagerly and
in a graph. The GPU time is the kernels' time. It is measured in a replay for both, so it does not show what a graph saves. The
host time shows the saving. So does the time from the call to an idle GPU, if the launches of an eager pass take longer than its
kernels. The copy of a batch into the graph's inputs is timed separately; the host times of a replay include this copy.

Outputs. The draft extend V2 computes logits of all rows, or logits and top-k of all rows, or logits of one row per request.

All variants of a point are interleaved in one process. L2 is warm: the LM head, a gigabyte, is far larger than L2. The floor
counts each byte once: the weights, the visible keys and values and the new ones, the inputs, and the outputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import product
from typing import Annotated, Any

import torch
import typer

from lab.commands.options import L2
from lab.kernels import default_implementation
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.speculation.draft_extend_graph import DraftExtendOutput
from lab.reports.tables import Table
from lab.timing.gpu_time import rounded_us
from lab.timing.host_time import CALLS_PER_BATCH, drain, host_time
from lab.timing.host_time import METHOD as HOST_METHOD
from lab.timing.work import GpuWork
from lab.workloads.requests import new_pool
from studies.model_pass import ModelWorks
from studies.recording import Formats, Recorded, StudyRow, rows_by_point, table_of
from studies.stand_in_model import GRAPH_MODES, LLAMA_8B_SIZES, StandInModel, StandInPass, StandInSizes, draw_pass
from studies.study import Part, Samples, TimedStudy, count, sizes
from studies.variants import Point, TimingPlan, Variant, measure_all

COMPLETION_METHOD = "perf_counter from the call to an idle GPU, each call on an idle GPU, all calls in turn"
COMPLETION_SAMPLES = 100
MODES_WIDTH = 4  # query rows per request where modes are compared
PAGE_SIZE = 64
# Launches of one batch of host times: fewer than the driver queues, about a thousand, before one has to wait for the GPU.
MOST_QUEUED_LAUNCHES = 500
ALL_ROWS = DraftExtendOutput.ALL_ROWS


def new_model(sizes: StandInSizes, max_batch_size: int, max_kv_len: int, device: torch.device) -> StandInModel:
    """Make a stand-in model, and a K/V pool for `max_batch_size` requests of `max_kv_len` tokens each."""
    lens = (max_kv_len,) * max_batch_size
    return StandInModel(sizes, new_pool(lens, page_size=PAGE_SIZE, max_context_len=max_kv_len, device=device))


def draw(model: StandInModel, mode: ForwardMode, batch_size: int, width: int, kv_len: int) -> StandInPass:
    """Draw a pass of requests with `kv_len` tokens, new ones included. In DRAFT_EXTEND, request i has i % width + 1 rows."""
    q_lens = [_rows(mode, width)] * batch_size
    if mode.query_rows is QueryRows.ACCEPTED:
        q_lens = [1 + request % width for request in range(batch_size)]
    return draw_pass(model, mode, [kv_len - q_len for q_len in q_lens], q_lens)


def _rows(mode: ForwardMode, width: int) -> int:
    return 1 if mode.query_rows is QueryRows.ONE else width


def free(model: StandInModel, drawn: StandInPass) -> None:
    for row in drawn.batch.req_pool_indices.tolist():
        model.pool.free_request(row)


def measure_mode(
    model: StandInModel, backend: TRTLLMMHABackend, mode: ForwardMode, batch_size: int, kv_len: int, plan: TimingPlan
) -> list[StudyRow]:
    """Measure a mode eagerly and in a CUDA graph, and the copies before a replay. Raises PointFailedError."""
    drawn = draw(model, mode, batch_size, MODES_WIDTH, kv_len)
    made = ModelWorks.of(model, backend, drawn, MODES_WIDTH)
    works = {"eager": made.eager(ALL_ROWS), "graph": made.graph(ALL_ROWS), "load": made.load()}
    point = _point(mode, batch_size, MODES_WIDTH, kv_len, works)
    rows = measure_all(point, lambda variants: works, plan, _work_facts)
    host = _host_times(made, works["eager"], next(row["launches"] for row in rows if row["arm"] == "eager"))
    free(model, drawn)
    return [row | host.get(row["arm"], {}) for row in rows]


def _host_times(made: ModelWorks, eager: GpuWork, eager_launches: int) -> dict[str, StudyRow]:
    """Measure interleaved host times and times until the GPU is idle, of an eager pass and of a replay with its copies."""
    replay, outputs = made.replay(ALL_ROWS)
    calls = {"eager": eager.call(), "graph": replay}
    per_batch = max(1, min(CALLS_PER_BATCH, MOST_QUEUED_LAUNCHES // eager_launches))
    host = host_time(calls, calls_per_batch=per_batch)
    completion = host_time(
        {name: partial(until_idle, call) for name, call in calls.items()}, batches=COMPLETION_SAMPLES, calls_per_batch=1
    )
    for written in (outputs, eager.arguments["outputs"]):
        made.hold(written, ALL_ROWS)
    return {
        variant: host[variant].facts()
        | {"completion_us": round(completion[variant].median_us, 2)}
        | {"completion_samples_us": rounded_us(completion[variant].samples_us)}
        for variant in calls
    }


def until_idle(call: Callable[[], object]) -> None:
    call()
    drain()


def measure_forms(
    model: StandInModel, backend: TRTLLMMHABackend, batch_size: int, width: int, kv_len: int, plan: TimingPlan
) -> list[StudyRow]:
    """Measure DRAFT_EXTEND_V2 with each kind of output, interleaved. Raises PointFailedError."""
    mode = ForwardMode.DRAFT_EXTEND_V2
    drawn = draw(model, mode, batch_size, width, kv_len)
    made = ModelWorks.of(model, backend, drawn, width)
    works = {form.value: made.graph(form) for form in DraftExtendOutput}
    point = _point(mode, batch_size, width, kv_len, works)
    rows = measure_all(point, lambda variants: works, plan, _form_facts)
    free(model, drawn)
    return rows


def _point(mode: ForwardMode, batch_size: int, width: int, kv_len: int, works: Mapping[str, GpuWork]) -> Point:
    tokens = _rows(mode, width)
    facts = {"mode": mode.name.lower(), "batch_size": batch_size, "num_draft_tokens": tokens, "kv_len": kv_len}
    return Point(
        f"{facts['mode']}, {batch_size} x {tokens}", tuple(Variant(name, facts["mode"]) for name in works), facts
    )


def _work_facts(variant: Variant, work: GpuWork) -> StudyRow:
    return {"bytes_moved": work.bytes_moved, "operations": work.operations}


def _form_facts(variant: Variant, work: GpuWork) -> StudyRow:
    return {"form": variant.name, "logits_bytes": work.arguments["outputs"].logits.nbytes, **_work_facts(variant, work)}


FORM_POINT = ("batch_size", "num_draft_tokens")


def savings(form_rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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


MODE_COLUMNS: Formats = {  # of the rows of a mode and batch size, by variant
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


FORM_COLUMNS: Formats = {  # of the rows of a point, by form, and its savings
    "requests": "{batch_size}",
    "draft tokens": "{num_draft_tokens}",
    **{form.value: f"{{{form.value}[median_us]:,.1f}} ({{{form.value}[floor_us]:,.1f}})" for form in DraftExtendOutput},
    "other rows cost": "{other_rows_cost_us:,.1f}",
    "dead top-k costs": "{dead_topk_cost_us:,.1f}",
    "saved, %": "{saved_percent:,.1f}",
}


@dataclass(frozen=True, kw_only=True)
class DraftExtendGraphStudy(TimedStudy):
    """Measures passes of equal requests in every mode that CUDA graphs can capture, and with every kind of output."""

    lists = ("modes", "forms")

    batch_sizes: Annotated[tuple[int, ...], sizes("requests of a batch")] = (1, 8, 32, 64)
    num_draft_tokens: Annotated[tuple[int, ...], sizes("query rows of each request in the comparison of outputs")] = (
        *(2, 4, 8),
    )
    kv_len: Annotated[int, count("tokens of each request, the new ones included")] = 4096
    implementation: Annotated[
        str | None,
        typer.Option(help="a module with FlashInfer's names; if left out, the lab's kernels that fit the GPU"),
    ] = None
    l2: L2 = "warm"
    samples: Samples = 30

    def __post_init__(self) -> None:
        new_tokens = max(*self.num_draft_tokens, MODES_WIDTH)
        if self.kv_len < new_tokens:
            raise ValueError(f"--kv-len {self.kv_len} counts the new tokens, and there are {new_tokens} of them")

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.implementation or default_implementation().__name__,)

    @cached_property
    def model_and_backend(self) -> tuple[StandInModel, TRTLLMMHABackend]:
        device = torch.device("cuda", torch.cuda.current_device())
        model = new_model(LLAMA_8B_SIZES, max(self.batch_sizes), self.kv_len, device)
        return model, TRTLLMMHABackend(import_module(self.modules[0]))

    @property
    def parts(self) -> Sequence[Part]:
        def modes_at(point: tuple[ForwardMode, int]) -> dict[str, list[StudyRow]]:
            return {"modes": measure_mode(*self.model_and_backend, *point, self.kv_len, self.plan)}

        def forms_at(point: tuple[int, int]) -> dict[str, list[StudyRow]]:
            return {"forms": measure_forms(*self.model_and_backend, *point, self.kv_len, self.plan)}

        modes, forms = product(GRAPH_MODES, self.batch_sizes), product(self.batch_sizes, self.num_draft_tokens)
        return Part(list(modes), modes_at, "modes"), Part(list(forms), forms_at, "outputs")

    def facts(self) -> Mapping[str, Any]:
        return {
            "host_method": HOST_METHOD,
            "completion_method": COMPLETION_METHOD,
            "implementation": self.modules[0],
            "model": asdict(LLAMA_8B_SIZES) | {"page_size": PAGE_SIZE},
        }

    def derived(self, result: Recorded) -> Mapping[str, Any]:
        return {"savings": savings(result["forms"])}

    def answer(self, result: Recorded) -> Iterable[Table]:
        method, modes = result["method"], rows_by_point(result["modes"], ("mode", "batch_size"), "arm")
        yield table_of(f"Eager against graph; GPU time by {method}", MODE_COLUMNS, modes.values())
        forms = rows_by_point(result["forms"], FORM_POINT, "form").values()
        found = [rows | saved for rows, saved in zip(forms, savings(result["forms"]), strict=True)]
        yield table_of(f"Draft extend V2, GPU time in µs (floor) by {method}", FORM_COLUMNS, found)
