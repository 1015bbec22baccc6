"""`lab experiments`: put the questions of `lab.experiments` to this machine's GPU, each with a command of its own."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lab.axes import positive
from lab.commands.options import (
    L2,
    NOT_JUDGED,
    Clock,
    Out,
    Trace,
    loaded,
    misused,
    need_gpu,
    prepare_machine,
    refuse,
    several,
    trace_name,
    traced,
)

if TYPE_CHECKING:
    from lab.experiments.arms import TimingPlan

experiments = typer.Typer(help="Put questions to this machine's GPU, and record the answers.", no_args_is_help=True)

Samples = Annotated[int, typer.Option(min=1, help="of each GPU time")]


def _only(words: str) -> Any:
    return several(str, f"measure only {words}", "NAME,...", default=None)


def _sizes(words: str, default: str) -> Any:
    return several(positive, words, "N,N,...", default=default)


def _times_us(words: str, default: str) -> Any:
    return several(float, f"{words}, µs", "US,US,...", default=default)


def _plan(clock: str, l2: str, samples: int) -> "TimingPlan":
    from lab.experiments.arms import timing_plan

    need_gpu()
    return timing_plan(clock, l2, samples)


@experiments.command()
def clocks(
    implementations: Annotated[
        list[str] | None, typer.Argument(help="modules; FlashInfer's and the portable one")
    ] = None,
    scenario: Annotated[list[str] | None, several(str, "instead of the default ones", "NAME,...")] = None,
    out: Out = None,
) -> None:
    """Time the same work by every clock of the lab: do they agree on this GPU?"""
    from lab.experiments import clocks as experiment
    from lab.workloads.scenarios import scenario as scenario_named

    scenarios = scenario or list(experiment.SCENARIOS)
    with misused():
        for name in scenarios:
            scenario_named(name)
    need_gpu()
    modules = implementations or ["lab.kernels.trtllm", "lab.kernels.portable"]
    for module in modules:
        loaded(module)
    raise typer.Exit(experiment.run(modules, scenarios, out))


@experiments.command()
def draft_extend_graph(
    *,
    batch_sizes: Annotated[list[int], _sizes("requests", "1,8,32,64")],
    num_draft_tokens: Annotated[list[int], _sizes("query rows of each request, where outputs are compared", "2,4,8")],
    kv_len: Annotated[int, typer.Option(min=1, help="tokens of each request, the new ones included")] = 4096,
    implementation: Annotated[
        str | None, typer.Option(help="a module with FlashInfer's names; what fits the GPU if left out")
    ] = None,
    clock: Clock = "graph",
    l2: L2 = "warm",
    samples: Samples = 30,
    out: Out = None,
) -> None:
    """Measure what a CUDA graph saves around a draft model's pass, and the trimmed outputs of its draft extend (25002)."""
    from lab.experiments import draft_extend_graph as experiment
    from lab.kernels import default_implementation

    with misused():
        experiment.check_kv_len(kv_len, num_draft_tokens)
    plan = _plan(clock, l2, samples)
    module = loaded(implementation or default_implementation().__name__)
    raise typer.Exit(experiment.run(batch_sizes, num_draft_tokens, kv_len, module, plan, out))


@experiments.command()
def draft_extend_kernels(
    *,
    q_lens: Annotated[list[int], _sizes("query rows of each request", "1,2,4,8,16,32")],
    requests: Annotated[list[int], _sizes("of a point", "1,4,16,64")],
    keys: Annotated[list[int], _sizes("of each request, the new tokens' included", "1024,4096,16384,65536,131072")],
    only: Annotated[list[str] | None, _only("these points, such as 4q2s1k")] = None,
    most_keys: Annotated[int, typer.Option(min=1, help="skip points of more keys over all requests")] = 2 * 1024 * 1024,
    clock: Clock = "graph",
    l2: L2 = "cold",
    samples: Samples = 15,
    out: Out = None,
) -> None:
    """Find which call is faster for draft extend: the decode call, or the context call (24566)."""
    from lab.experiments import draft_extend_kernels as experiment
    from lab.experiments.arms import chosen
    from lab.workloads.batches import sweep

    with misused():
        batches = chosen(sweep(requests, keys, q_lens), only or (), str)
    raise typer.Exit(experiment.run(batches, most_keys, _plan(clock, l2, samples), out))


@experiments.command()
def draft_steps(
    trace: Trace = None,
    only: Annotated[list[str] | None, _only("these points, on the grid or off it, such as 64x8k/steps3")] = None,
    clock: Clock = "graph",
    l2: L2 = "warm",
    samples: Samples = 30,
    out: Out = None,
) -> None:
    """Measure what the draft steps' dead ragged lists cost (26241), and what one launch for all steps would save."""
    from lab.experiments import draft_steps as experiment

    with misused():
        requests = traced(trace)
        points = [experiment.point_of(name, requests) for name in only or experiment.EVERY_POINT]
        # Only all points have what 26241's figures are held against.
        host_points = [] if only else [experiment.point_of(name, requests) for name in experiment.HOST_POINTS]
    raise typer.Exit(experiment.run(points, host_points, _plan(clock, l2, samples), trace_name(trace), out))


@experiments.command()
def draft_visibility(
    prefix_len: Annotated[
        int, typer.Option(min=0, help="tokens before the draft; 31 ends in front of a page's edge")
    ] = 31,
    steps: Annotated[int, typer.Option(min=1, help="speculative_num_steps")] = 4,
    out: Out = None,
) -> None:
    """Show which keys the query of a draft step can see, with the lengths that the multi-step backends hand their kernel."""
    prepare_machine()
    from lab.experiments import draft_visibility as experiment

    with misused():
        try:
            raise typer.Exit(experiment.run(prefix_len, steps, out))
        except NotImplementedError as error:
            refuse(f"not run: {error}", NOT_JUDGED)


@experiments.command()
def kv_read_once(
    only: Annotated[list[str] | None, _only("groups, such as e4m3, heads or host, or points of these names")] = None,
    portable_only: Annotated[bool, typer.Option("--portable-only", help="leave FlashInfer's kernels out")] = False,
    trace: Trace = None,
    clock: Clock = "graph",
    l2: L2 = "cold",
    samples: Samples = 15,
    out: Out = None,
) -> None:
    """Time kernels that read K/V once for all query rows against their targets, and against the floor."""
    from lab.experiments import kv_read_once as experiment

    with misused():
        points = experiment.points_of(only or (), traced(trace), portable_only)
    raise typer.Exit(experiment.run(points, _plan(clock, l2, samples), trace_name(trace), out))


# What the two loops share: the fields of `lab.experiments.loops.LoopSettings`.
BatchSize = Annotated[int, typer.Option(min=1, help="requests")]
NumDraftTokens = Annotated[int, typer.Option(min=1, help="query rows of each request")]
SeqLen = Annotated[int, typer.Option(min=1, help="tokens of each request at the start")]
PageSize = Annotated[int, typer.Option(min=1, help="tokens per page")]
WarmUpSteps = Annotated[int, typer.Option(help="of one run, not counted")]
Steps = Annotated[int, typer.Option(help="of one run, counted")]
Repeats = Annotated[int, typer.Option(help="runs of each arm")]


def _settings(context: typer.Context) -> dict[str, Any]:
    return {name: value for name, value in context.params.items() if name != "out"}


@experiments.command()
def length_copy(
    context: typer.Context,
    *,
    gpu_us: Annotated[list[float], _times_us("GPU time of a step", "500,2000")],
    host_us: Annotated[list[float], _times_us("the scheduler's time of a step", "200")],
    batch_size: BatchSize = 64,
    num_draft_tokens: NumDraftTokens = 4,
    seq_len: SeqLen = 4096,
    page_size: PageSize = 64,
    warm_up_steps: WarmUpSteps = 5,
    steps: Steps = 15,
    repeats: Repeats = 5,
    out: Out = None,
) -> None:
    """Measure what the copy of lengths to the host costs a decode loop (26824)."""
    from lab.experiments import length_copy as experiment
    from lab.experiments.loops import loops_of

    with misused():
        loops = loops_of(experiment.CopyLoopSettings, **_settings(context))
    need_gpu()
    raise typer.Exit(experiment.run(loops, out))


@experiments.command()
def plan_stream(
    context: typer.Context,
    *,
    draft_us: Annotated[list[float], _times_us("GPU time of the draft steps", "100,400")],
    verify_us: Annotated[list[float], _times_us("GPU time of the target model", "1000")],
    max_context_len: Annotated[int, typer.Option(min=1, help="of the pool")] = 131072,
    batch_size: BatchSize = 64,
    num_draft_tokens: NumDraftTokens = 4,
    seq_len: SeqLen = 4096,
    page_size: PageSize = 64,
    warm_up_steps: WarmUpSteps = 3,
    steps: Steps = 12,
    repeats: Repeats = 5,
    out: Out = None,
) -> None:
    """Measure when a plan beside the draft makes an iteration shorter (25925)."""
    from lab.experiments import plan_stream as experiment
    from lab.experiments.loops import loops_of

    with misused():
        loops = loops_of(experiment.PlanLoopSettings, **_settings(context))
    need_gpu()
    raise typer.Exit(experiment.run(loops, out))


def _shape(text: str) -> tuple[int, int]:
    requests, times, keys = text.partition("x")
    if not times:
        raise ValueError(f"{text} is no shape such as 64x8192")
    return positive(requests), positive(keys)


@experiments.command()
def mla_decode(
    *,
    shapes: Annotated[
        list[Any],
        several(
            _shape, "keys of each request, the new tokens' included", "REQUESTSxKEYS,...", default="64x8192,8x81920"
        ),
    ],
    heads: Annotated[list[int], _sizes("query heads", "16,128")],
    q_lens: Annotated[list[int], _sizes("query rows of each request; more than 1 verify", "1")],
    kv_dtype: Annotated[Literal["bf16", "e4m3"], typer.Option(help="of the cache")] = "bf16",
    only: Annotated[list[str] | None, _only("these points, such as '64q1s8k/16 heads'")] = None,
    clock: Clock = "graph",
    l2: L2 = "cold",
    samples: Samples = 15,
    out: Out = None,
) -> None:
    """Time the portable MLA decode against FlashInfer's BatchMLAPagedAttentionWrapper, and both against the floor."""
    from lab.experiments import mla_decode as experiment
    from lab.experiments.arms import chosen

    with misused():
        cases = experiment.cases_of(shapes, heads, q_lens, experiment.KV_DTYPES[kv_dtype])
        points = chosen(map(experiment.point_of, cases), only or (), lambda point: point.name)
    raise typer.Exit(experiment.run(points, _plan(clock, l2, samples), out))


@experiments.command()
def changes(
    recorded: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="measure nothing: show these recordings")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="where the recordings and experiments.md go", show_default=".benchmarks/experiments"
        ),
    ] = None,
    only: Annotated[list[int] | None, several(positive, "numbers of changes", "NUMBER,...")] = None,
) -> None:
    """Measure SGLang's five changes, one after the other, or show their recordings."""
    from lab.reports.changes.run import show

    with misused():
        raise typer.Exit(show(recorded, out, only or ()))
