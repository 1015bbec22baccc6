"""How fast are the portable kernels, which read K/V once, compared with FlashInfer's XQA and fmha_v2 and with the floor?

    lab experiments kv-read-once --out kv_read_once.json
    lab experiments kv-read-once --only 64x4096,trace --out kv_read_once.json
    lab experiments kv-read-once --only heads --portable-only --out kv_read_once.json

One layer of 32 query and 4 K/V heads of 128 (Qwen3-32B, one rank of two) unless a group says otherwise, pages of 64, bf16. The
groups, which `--only` takes one by one:

    64x4096, 16x32768, 1x81920, 1x4096   requests x keys of each, 1 to 16 query tokens on the decode call
    trace        64 running requests of a trace, 1 to 16 query tokens
    e4m3         the portable kernel with an e4m3 cache against itself with a bf16 one, 64x8192
    heads        groups of 1 to 16 and heads of 64 to 256 over 4 K/V heads, 64x4096
    windows      the sliding-window layers of gpt-oss-120b, 64x4096; the floor has the window's whole pages
    extend       512 query tokens over 32,768 keys, and a prompt of 4,096 tokens, on the context call
    unequal      a request of 81,920 keys and 63 of 512
    host         host time of eager calls, all of their work done in each; no GPU time
    host_prepared   the same, of prepared calls

At every point the variants are interleaved. L2 is cold: each call has its own buffers. Each variant runs before it is captured,
so that no time includes a compilation. fmha_v2's time includes the small launch that writes its page table. A variant that
declines a point, or whose module FlashInfer cannot load or build, is listed with the reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer

from lab.commands.options import Trace
from lab.metadata.engine.forward_mode import ForwardMode
from lab.reports.tables import Table
from lab.timing.gpu_time import check_named, interquartile_range
from lab.timing.host_time import METHOD as HOST_METHOD
from lab.timing.host_time import HostTime, host_time
from lab.timing.sampling import fresh_seed
from lab.timing.staging import renew
from lab.timing.work import GpuWork
from lab.workloads.batches import parse_batch
from lab.workloads.forward_case import ForwardCase
from lab.workloads.geometries import Geometry
from lab.workloads.inputs.redraw import Seeds
from lab.workloads.scenarios import scenario
from lab.workloads.traces import TracedRequest
from studies.passes import FLASHINFER_MODULE, PORTABLE_MODULE, eager_call, gpu_works, pass_facts, works_of
from studies.recording import Formats, Recorded, StudyRow, table_of
from studies.study import Part, TimedStudy, names, requests_of, trace_name
from studies.targets import TIME_COLUMNS, Figure, Target, score, target_cell, target_rows
from studies.variants import JUDGED, OUTCOMES, Point, PointRows, Variant, Works, measure_point, measure_variants

MODEL, RANK = "qwen3-32b", "tp2"  # 64 / 8 heads of 128 over two GPUs: 32 / 4
PORTABLE, FLASHINFER, E4M3_CACHE = "portable", "flashinfer", "portable e4m3"
HOST, HOST_PREPARED = "host", "host_prepared"
# The groups that have host times, and what their points' names begin with.
HOST_FORMS = {HOST: "eager", HOST_PREPARED: "prepared"}

Targets = tuple[Target, ...]


def _targets(speed: float, bandwidth_percent: float | None = None) -> Targets:
    """Return targets: the speed relative to the baseline, and the percentage of the measured copy bandwidth."""
    speeds = (Target(Figure.SPEED, speed),)
    return speeds if bandwidth_percent is None else (*speeds, Target(Figure.BANDWIDTH, bandwidth_percent))


# All targets are those of the record's table (issue 8), set for an H200: for 1, 2, 4, 8 and 16 query tokens.
Q_LENS = (1, 2, 4, 8, 16)
_ONE_REQUEST = (*[_targets(1.1)] * 3, _targets(1.9), _targets(2.8))
_MANY_KEYS = (*[_targets(1.02, 92)] * 3, _targets(1.75, 90), _targets(2.8, 80))
_TRACED = (*[_targets(1.1)] * 3, _targets(1.75), _targets(2.8))
# Of a whole call and of a prepared one, each without a graph.
HOST_TARGETS: Mapping[str, Targets] = {HOST: (Target(Figure.HOST, 80.0),), HOST_PREPARED: (Target(Figure.HOST, 25.0),)}
# Query heads per K/V head and head_dim, 4 K/V heads throughout so that groups read the same bytes.
HEADS = ((1, 128), (4, 128), (5, 128), (8, 128), (16, 128), (8, 64), (8, 256))
WINDOW_MODEL = "gpt-oss-120b"  # a window of 128 keys, its own included


def _decode_call(
    batch: str, q_lens: Sequence[int] = Q_LENS, model: str = MODEL, rest: str = f"/{RANK}"
) -> tuple[str, ...]:
    modes = {q: (ForwardMode.DECODE if q == 1 else ForwardMode.TARGET_VERIFY).name.lower() for q in q_lens}
    return tuple(f"{mode}/{model}/{batch.format(q=q)}{rest}" for q, mode in modes.items())


def _host(form: str, targets: Targets) -> dict[str, Targets]:
    batches = ("decode/{}/64q1s4k/{}", "target_verify/{}/64q4s4k/{}", "extend/{}/q512s4k/{}")
    return {f"{form}/{batch.format(MODEL, RANK)}": targets for batch in batches}


# By group: the scenarios, and their targets.
GROUPS: Mapping[str, Mapping[str, Targets]] = {
    "64x4096": dict(zip(_decode_call("64q{q}s4k"), _MANY_KEYS, strict=True)),
    "16x32768": dict(zip(_decode_call("16q{q}s32k"), _MANY_KEYS, strict=True)),
    "1x81920": dict(zip(_decode_call("1q{q}s80k"), _ONE_REQUEST, strict=True)),
    "1x4096": dict(zip(_decode_call("1q{q}s4k"), _ONE_REQUEST, strict=True)),
    "trace": dict(zip(_decode_call("trace64q{q}"), _TRACED, strict=True)),
    # The table names no number of query tokens: its target holds for each of these.
    "e4m3": dict.fromkeys(_decode_call("64q{q}s8k", (1, 4), rest=f"/{RANK}/e4m3"), _targets(1.6)),
    "heads": {
        name: ()
        for group, head_dim in HEADS
        for name in _decode_call("64q{q}s4k", (1, 4), f"heads-{4 * group}-4-{head_dim}", rest="")
    },
    "windows": dict.fromkeys(_decode_call("64q{q}s4k", (1, 4, 16), WINDOW_MODEL, "/window"), ()),
    "extend": {f"extend/{MODEL}/q512s32k/{RANK}": _targets(1.0), f"extend/{MODEL}/q4k/{RANK}": _targets(0.7)},
    "unequal": dict.fromkeys(_decode_call("q{q}s80k_63q{q}s512", (1, 4, 16)), ()),
    **{group: _host(form, HOST_TARGETS[group]) for group, form in HOST_FORMS.items()},
}


@dataclass(frozen=True, repr=False)
class HeadsCase(ForwardCase):
    """A forward pass with sizes of heads that no model of `GEOMETRIES` has. `geometry` is their name."""

    heads: Geometry = field(kw_only=True)

    @property
    def model(self) -> Geometry:
        return self.heads


def heads_case(name: str) -> HeadsCase:
    """Return the pass of a name such as "decode/heads-32-4-128/64q1s4k": 32 query heads, 4 K/V heads, a head_dim of 128."""
    mode, heads, sizes = name.split("/")
    num_qo_heads, num_kv_heads, head_dim = map(int, heads.split("-")[1:])
    geometry = Geometry(heads, num_qo_heads, num_kv_heads, head_dim, head_dim**-0.5, "no model's: one axis at a time")
    batch = parse_batch(sizes)
    return HeadsCase(ForwardMode[mode.upper()], heads, batch.prefix_lens, batch.q_lens, heads=geometry)


def point_of(group: str, name: str, trace: Sequence[TracedRequest], portable_only: bool = False) -> Point:
    targets = GROUPS[group][name]
    if group == "e4m3":
        halved = Variant(E4M3_CACHE, scenario(name), PORTABLE_MODULE, targets)
        variants = [halved, Variant(PORTABLE, scenario(name.removesuffix("/e4m3")), PORTABLE_MODULE)]
    else:
        plain = name.removeprefix(f"{HOST_FORMS.get(group, '')}/")
        case = heads_case(name) if group == "heads" else scenario(plain, trace)
        variants = [Variant(PORTABLE, case, PORTABLE_MODULE, targets)]
        if not portable_only:
            variants.append(Variant(FLASHINFER, case, FLASHINFER_MODULE, needs_flashinfer=True))
    return Point(name, tuple(variants), {"group": group}, baseline=variants[-1].name)


def points_of(only: Sequence[str], trace: Sequence[TracedRequest], portable_only: bool = False) -> list[Point]:
    """Return the points of these groups or with these names; without names, all. Raises ValueError for an unknown name."""
    listed = [(group, name) for group, names in GROUPS.items() for name in names]
    unknown = set(only).difference(*listed)
    if unknown:
        raise ValueError(f"no group or point is called {min(unknown)!r}; groups: {', '.join(GROUPS)}")
    return [point_of(*each, trace, portable_only) for each in listed if not only or set(each) & set(only)]


def floor_bytes(case: ForwardCase) -> int:
    """Return the bytes that a kernel must move. The pages of a sliding window count as a whole, because the pool keeps them."""
    if case.window_left < 0:
        return case.bytes_moved
    unseen = 0  # tokens in the window's pages that no row sees
    for kv_len, q_len in zip(case.kv_lens, case.q_lens, strict=True):
        first = max(0, kv_len - q_len - case.window_left)
        unseen += first % case.page_size + -kv_len % case.page_size
    return case.bytes_moved + 2 * unseen * case.model.num_kv_heads * case.model.head_dim * case.kv_dtype.itemsize


def facts_of(variant: Variant, work: GpuWork) -> dict[str, Any]:
    case = variant.case
    return {
        "q_len": max(case.q_lens),
        "longest_kv_len": max(case.kv_lens),
        **{name: getattr(case.model, name) for name in ("num_qo_heads", "num_kv_heads", "head_dim")},
        "window_left": case.window_left,
        **pass_facts(variant, work),
        "floor_bytes": floor_bytes(case),
    }


def measure_host(point: Point) -> PointRows:
    """Measure interleaved host times of calls. Each call is prepared anew, except in the group of prepared calls."""
    prepare = None if point.facts["group"] == HOST_PREPARED else eager_call

    def row_of(variant: Variant, work: GpuWork, times: Mapping[str, HostTime]) -> StudyRow:
        time = times[variant.name]
        spread = {"iqr_us": round(interquartile_range(time.samples_us), 2), "method": HOST_METHOD}
        targets = target_rows(variant.targets, {Figure.HOST: time.median_us}, point.baseline)
        return facts_of(variant, work) | time.facts() | spread | {"targets": targets}

    return measure_variants(
        point, lambda variants: works_of(variants, torch.device("cuda"), prepare), _host_times, row_of
    )


def _host_times(works: Works) -> dict[str, HostTime]:
    calls = {name: work.call() for name, work in works.items()}
    seeds = Seeds(fresh_seed(), fresh_seed())
    for name, work in works.items():  # which share their inputs
        renew(work, seeds)
        calls[name]()
        check_named(name, [work], seeds)
    times = host_time(calls)
    for name, work in works.items():
        check_named(name, [work], seeds)
    return times


HOST_COLUMNS: Formats = {
    "point": "{point}",
    "variant": "{arm}",
    "host, µs": "{host_us:.2f}",
    "spread, µs": "{iqr_us:.2f}",
    "targets": target_cell,
}


@dataclass(frozen=True, kw_only=True)
class KVReadOnce(TimedStudy):
    """Measures the groups of points, and compares the results with the targets."""

    lists = (*OUTCOMES, "host")

    only: Annotated[tuple[str, ...], names("groups (such as e4m3, heads, host) or points of these names")] = ()
    portable_only: Annotated[bool, typer.Option("--portable-only", help="leave FlashInfer's kernels out")] = False
    trace: Trace = None

    @property
    def parts(self) -> Sequence[Part]:
        return [Part(points_of(self.only, requests_of(self.trace), self.portable_only), self._rows_at)]

    def _rows_at(self, point: Point) -> Mapping[str, Sequence[StudyRow]]:
        if point.facts["group"] in HOST_FORMS:
            return measure_host(point).by_list("host")
        return measure_point(point, gpu_works, self.plan, facts_of).by_list()

    def facts(self) -> Mapping[str, Any]:
        return {"host_method": HOST_METHOD, "trace": trace_name(self.trace), "judged": JUDGED}

    def derived(self, result: Recorded) -> Mapping[str, Any]:
        return {"targets": score(result["rows"] + result["host"])}

    def answer(self, result: Recorded) -> Iterable[Table | str]:
        if result["rows"]:
            yield table_of(f"K/V read once, one layer: {result['method']}", TIME_COLUMNS, result["rows"])
        if result["host"]:
            yield table_of(f"Calls without a graph: {HOST_METHOD}", HOST_COLUMNS, result["host"])
        counts = (f"{count} {name.replace('_', ' ')}" for name, count in result["targets"].items())
        yield f"targets: {', '.join(counts)}"
