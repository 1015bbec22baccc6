"""`lab experiments`: a command for each experiment of `studies`, which puts one question to this machine's GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lab.commands.options import (
    L2,
    Clock,
    Out,
    Trace,
    list_option,
    load_or_refuse,
    need_gpu,
    prepare_machine,
    refuse,
    refusing_errors,
    requests_of,
    trace_name,
)
from lab.exit_status import ExitStatus
from lab.ranges import POSITIVE

if TYPE_CHECKING:
    from studies.arms import TimingPlan

experiments = typer.Typer(help="Put questions to this machine's GPU, and record the answers.", no_args_is_help=True)

Samples = Annotated[int, typer.Option(min=1, help="samples of each GPU time")]
Implementations = Annotated[
    list[str] | None,
    typer.Argument(help="modules to time; if left out, lab.kernels.trtllm and lab.kernels.portable"),
]
Scenarios = Annotated[list[str] | None, list_option(str, "scenarios to time instead of the default ones", "NAME,...")]


def _only_option(chosen: str) -> Any:
    """Return an option of names of points; `chosen` completes its help, "measure only ..."."""
    return list_option(str, f"measure only {chosen}", "NAME,...")


def _sizes_option(help_text: str, default: str) -> Any:
    return list_option(POSITIVE.read, help_text, "N,N,...", default=default)


def _times_us_option(help_text: str, default: str) -> Any:
    return list_option(float, f"{help_text}, µs", "US,US,...", default=default)


def _timing_plan(clock: str, l2: str, samples: int) -> "TimingPlan":
    """Return the method and the samples of each GPU time, or end the command if there is no GPU."""
    from studies.arms import timing_plan

    need_gpu()
    return timing_plan(clock, l2, samples)


@experiments.command()
def clocks(
    implementations: Implementations = None,
    scenario: Scenarios = None,
    out: Out = None,
) -> None:
    """Time the same work by every clock of the lab: do they agree on this GPU?"""
    from lab.workloads.scenarios import scenario as scenario_named
    from studies import clocks as experiment

    scenarios = scenario or list(experiment.SCENARIOS)
    with refusing_errors():
        for name in scenarios:
            scenario_named(name)
    need_gpu()
    modules = implementations or ["lab.kernels.trtllm", "lab.kernels.portable"]
    for module in modules:
        load_or_refuse(module)
    raise typer.Exit(experiment.run(modules, scenarios, out))


@experiments.command()
def decode_split(
    implementations: Implementations = None,
    *,
    splits: Annotated[list[int], _sizes_option("numbers of decode calls besides 1", "2,4,8")],
    only: Scenarios = None,
    trace: Trace = None,
    clock: Clock = "graph",
    l2: L2 = "cold",
    samples: Samples = 15,
    out: Out = None,
) -> None:
    """Measure what a decode divided into several calls by length saves, and what it costs (an option of SGLang)."""
    from studies import decode_split as experiment

    with refusing_errors():
        requests = requests_of(trace)
        numbers = [number for number in dict.fromkeys(splits) if number > 1]
        points = [
            experiment.point_of(name, module, numbers, requests)
            for name in only or experiment.SCENARIOS
            for module in implementations or experiment.MODULES
        ]
    plan = _timing_plan(clock, l2, samples)
    for module in implementations or experiment.MODULES:
        load_or_refuse(module)
    raise typer.Exit(experiment.run(points, plan, trace_name(trace), out))


@experiments.command()
def draft_extend_graph(
    *,
    batch_sizes: Annotated[list[int], _sizes_option("requests of a batch", "1,8,32,64")],
    num_draft_tokens: Annotated[
        list[int], _sizes_option("query rows of each request in the comparison of outputs", "2,4,8")
    ],
    kv_len: Annotated[int, typer.Option(min=1, help="tokens of each request, the new ones included")] = 4096,
    implementation: Annotated[
        str | None,
        typer.Option(help="a module with FlashInfer's names; if left out, the lab's kernels that fit the GPU"),
    ] = None,
    clock: Clock = "graph",
    l2: L2 = "warm",
    samples: Samples = 30,
    out: Out = None,
) -> None:
    """Measure the time that a CUDA graph saves around a draft model's pass, and that trimmed outputs save (SGLang's 25002)."""
    from lab.kernels import default_implementation
    from studies import draft_extend_graph as experiment

    with refusing_errors():
        experiment.check_kv_len(kv_len, num_draft_tokens)
    plan = _timing_plan(clock, l2, samples)
    module = load_or_refuse(implementation or default_implementation().__name__)
    raise typer.Exit(experiment.run(batch_sizes, num_draft_tokens, kv_len, module, plan, out))


@experiments.command()
def draft_extend_kernels(
    *,
    q_lens: Annotated[list[int], _sizes_option("query rows of each request", "1,2,4,8,16,32")],
    requests: Annotated[list[int], _sizes_option("requests of a point", "1,4,16,64")],
    keys: Annotated[
        list[int], _sizes_option("keys of each request, the new tokens included", "1024,4096,16384,65536,131072")
    ],
    only: Annotated[list[str] | None, _only_option("these points, such as 4q2s1k")] = None,
    most_keys: Annotated[int, typer.Option(min=1, help="skip points with more keys in all requests together")] = 2**21,
    clock: Clock = "graph",
    l2: L2 = "cold",
    samples: Samples = 15,
    out: Out = None,
) -> None:
    """Find the faster call for draft extend: the decode call or the context call (SGLang's 24566)."""
    from lab.workloads.batches import sweep
    from studies import draft_extend_kernels as experiment
    from studies.arms import chosen

    with refusing_errors():
        batches = chosen(sweep(requests, keys, q_lens), only or (), str)
    raise typer.Exit(experiment.run(batches, most_keys, _timing_plan(clock, l2, samples), out))


@experiments.command()
def draft_steps(
    trace: Trace = None,
    only: Annotated[list[str] | None, _only_option("these points, such as 64x8k/steps3; any sizes will do")] = None,
    clock: Clock = "graph",
    l2: L2 = "warm",
    samples: Samples = 30,
    out: Out = None,
) -> None:
    """Measure the cost of a draft's unread ragged lists (SGLang's 26241), and the time that one launch for all steps saves."""
    from studies import draft_steps as experiment

    with refusing_errors():
        requests = requests_of(trace)
        points = [experiment.point_of(name, requests) for name in only or experiment.EVERY_POINT]
        # The table that compares them with the figures of change 26241 needs all points.
        host_points = [] if only else [experiment.point_of(name, requests) for name in experiment.HOST_POINTS]
    raise typer.Exit(experiment.run(points, host_points, _timing_plan(clock, l2, samples), trace_name(trace), out))


@experiments.command()
def draft_visibility(
    prefix_len: Annotated[
        int,
        typer.Option(min=0, help="tokens before the draft; pages have 32, so that 31 leave one free in the last page"),
    ] = 31,
    steps: Annotated[int, typer.Option(min=1, help="steps of the draft, speculative_num_steps")] = 4,
    out: Out = None,
) -> None:
    """Show the keys that the query of each draft step can see, with the lengths that each multi-step backend passes."""
    prepare_machine()
    from studies import draft_visibility as experiment

    with refusing_errors():
        try:
            raise typer.Exit(experiment.run(prefix_len, steps, out))
        except NotImplementedError as error:
            refuse(f"not run: {error}", ExitStatus.NOT_JUDGED)


@experiments.command()
def kv_read_once(
    only: Annotated[
        list[str] | None, _only_option("groups (such as e4m3, heads, host) or points of these names")
    ] = None,
    portable_only: Annotated[bool, typer.Option("--portable-only", help="leave FlashInfer's kernels out")] = False,
    trace: Trace = None,
    clock: Clock = "graph",
    l2: L2 = "cold",
    samples: Samples = 15,
    out: Out = None,
) -> None:
    """Time kernels that read K/V once for all query rows, and compare the times with targets and with the floor."""
    from studies import kv_read_once as experiment

    with refusing_errors():
        points = experiment.points_of(only or (), requests_of(trace), portable_only)
    raise typer.Exit(experiment.run(points, _timing_plan(clock, l2, samples), trace_name(trace), out))


# Options that both loops have: the fields of `studies.loops.LoopSettings`.
BatchSize = Annotated[int, typer.Option(min=1, help="requests of the batch")]
NumDraftTokens = Annotated[int, typer.Option(min=1, help="query rows of each request")]
SeqLen = Annotated[int, typer.Option(min=1, help="tokens of each request at the start")]
PageSize = Annotated[int, typer.Option(min=1, help="tokens per page")]
WarmUpSteps = Annotated[int, typer.Option(help="steps before the counted ones in each run")]
Steps = Annotated[int, typer.Option(help="counted steps of each run")]
Repeats = Annotated[int, typer.Option(help="runs of each arm")]


def _loop_settings(context: typer.Context) -> dict[str, Any]:
    """Return the command's options that are fields of its loop's settings: all but --out."""
    return {name: value for name, value in context.params.items() if name != "out"}


@experiments.command()
def length_copy(
    context: typer.Context,
    *,
    gpu_us: Annotated[list[float], _times_us_option("GPU time of a step", "500,2000")],
    host_us: Annotated[list[float], _times_us_option("time of the scheduler on the host in a step", "200")],
    batch_size: BatchSize = 64,
    num_draft_tokens: NumDraftTokens = 4,
    seq_len: SeqLen = 4096,
    page_size: PageSize = 64,
    warm_up_steps: WarmUpSteps = 5,
    steps: Steps = 15,
    repeats: Repeats = 5,
    out: Out = None,
) -> None:
    """Measure the time that copying lengths to the host costs a decode loop (SGLang's 26824)."""
    from studies import length_copy as experiment
    from studies.loops import loops_of

    with refusing_errors():
        loops = loops_of(experiment.CopyLoopSettings, **_loop_settings(context))
    need_gpu()
    raise typer.Exit(experiment.run(loops, out))


@experiments.command()
def plan_stream(
    context: typer.Context,
    *,
    draft_us: Annotated[list[float], _times_us_option("GPU time of the draft steps", "100,400")],
    verify_us: Annotated[list[float], _times_us_option("GPU time of the target model", "1000")],
    max_context_len: Annotated[
        int, typer.Option(min=1, help="most tokens of a request, which the page tables have room for")
    ] = 131072,
    batch_size: BatchSize = 64,
    num_draft_tokens: NumDraftTokens = 4,
    seq_len: SeqLen = 4096,
    page_size: PageSize = 64,
    warm_up_steps: WarmUpSteps = 3,
    steps: Steps = 12,
    repeats: Repeats = 5,
    out: Out = None,
) -> None:
    """Measure when planning on a second stream beside the draft shortens an iteration (SGLang's 25925)."""
    from studies import plan_stream as experiment
    from studies.loops import loops_of

    with refusing_errors():
        loops = loops_of(experiment.PlanLoopSettings, **_loop_settings(context))
    need_gpu()
    raise typer.Exit(experiment.run(loops, out))


def _requests_and_keys(text: str) -> tuple[int, int]:
    """Return (requests, keys) of a text such as "64x8192"; raise ValueError for another form."""
    requests, times, keys = text.partition("x")
    if not times:
        raise ValueError(f"{text} is not of the form REQUESTSxKEYS, such as 64x8192")
    return POSITIVE.read(requests), POSITIVE.read(keys)


@experiments.command()
def mla_decode(
    *,
    shapes: Annotated[
        list[Any],
        list_option(
            _requests_and_keys,
            "requests, and keys of each with the new tokens included",
            "REQUESTSxKEYS,...",
            default="64x8192,8x81920",
        ),
    ],
    heads: Annotated[list[int], _sizes_option("query heads", "16,128")],
    q_lens: Annotated[list[int], _sizes_option("query rows of each request; more than 1 is a verify pass", "1")],
    kv_dtype: Annotated[Literal["bf16", "e4m3"], typer.Option(help="dtype of the K/V cache")] = "bf16",
    only: Annotated[list[str] | None, _only_option("these points, such as '64q1s8k/16 heads'")] = None,
    clock: Clock = "graph",
    l2: L2 = "cold",
    samples: Samples = 15,
    out: Out = None,
) -> None:
    """Time the portable MLA decode and FlashInfer's BatchMLAPagedAttentionWrapper; compare them, and both with the floor."""
    from studies import mla_decode as experiment
    from studies.arms import chosen

    with refusing_errors():
        cases = experiment.cases_of(shapes, heads, q_lens, experiment.KV_DTYPES[kv_dtype])
        points = chosen(map(experiment.point_of, cases), only or (), lambda point: point.name)
    raise typer.Exit(experiment.run(points, _timing_plan(clock, l2, samples), out))


@experiments.command()
def changes(
    recorded: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="measure nothing, and show the recordings of this folder"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="the folder for the recordings and experiments.md",
            show_default=".benchmarks/experiments",
        ),
    ] = None,
    only: Annotated[
        list[int] | None, list_option(POSITIVE.read, "numbers of SGLang's changes; all if left out", "NUMBER,...")
    ] = None,
) -> None:
    """Measure five changes of SGLang one after the other, or show their recordings."""
    from studies.changes.run import show

    with refusing_errors():
        raise typer.Exit(show(recorded, out, only or ()))
