"""Benchmarks in pytest-benchmark: GPU time by a chosen method on a GPU; without one, kernels are judged, not timed."""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.calls import AttentionCall
from lab.checks import CaseVerdict, judge_forward
from lab.gpus import capability_of
from lab.integrity import ChangedBindingsError, bindings
from lab.kernels.support import modules_of
from lab.loading import load
from lab.provenance import environment
from lab.recorded.case import recorded_cases
from lab.reports.judgement import reproduction
from lab.timing import L2, Ceilings, DeviceClock, GpuTime, Method, measure_ceilings, method_named
from lab.timing.forward import DeclinedError, TimedCase, TimedPass, time_facts, time_interleaved
from lab.timing.sampling import RefusedTimeError
from lab.workloads import DEFAULT_SCENARIOS, ForwardCase
from lab.workloads.scenarios import timed_scenario
from lab.workloads.traces import TracedRequest, own_trace, read_trace
from studies.draft_scenarios import DEFAULT_DRAFT_SCENARIOS, draft_scenario, is_draft_scenario
from tests.benchmarks.summary import judged_table, timed_tables

HAS_GPU = torch.cuda.is_available()
IMPLEMENTATIONS = ("lab.kernels.portable", "lab.kernels.trtllm")
ALL = "all"
METHOD = pytest.StashKey[Method]()
CLOCKS = pytest.StashKey[dict[Method, DeviceClock]]()
CEILINGS = pytest.StashKey[Ceilings]()
JUDGED = pytest.StashKey[list[CaseVerdict]]()
TIMED = pytest.StashKey[list[dict[str, Any]]]()
NOT_TIMED = pytest.StashKey[list[dict[str, Any]]]()


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.stash[METHOD] = method = method_named(config.getoption("--lab-clock"), config.getoption("--lab-l2"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    given = [option for option in ("--lab-scenario", "--lab-trace") if config.getoption(option)]
    if config.getoption("--lab-calls") and given:
        raise pytest.UsageError(f"--calls times recorded calls and no scenario: leave out {', '.join(given)}")
    config.stash[CLOCKS] = {each: DeviceClock(str(each)) for each in (method, replace(method, l2=L2.WARM))}
    config.stash[JUDGED], config.stash[TIMED] = [], []
    config.stash[NOT_TIMED] = _not_here() if _takes_all(config) else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`scenario_name`, its `case` or `draft`, and `implementation` are the command line's, or the default level's.

    With --lab-calls, a `case` is a recorded call, and its address is the name.
    """
    if "scenario_name" in metafunc.fixturenames:
        is_draft = "draft" in metafunc.fixturenames
        named, read = metafunc.config.getoption("--lab-scenario"), draft_scenario if is_draft else timed_scenario
        names = [name for name in named or () if is_draft_scenario(name) == is_draft]
        if not named:
            names = list(DEFAULT_DRAFT_SCENARIOS if is_draft else DEFAULT_SCENARIOS)
        calls = metafunc.config.getoption("--lab-calls")
        try:
            trace = _trace(metafunc.config)
            if calls:
                cases = [] if is_draft else [(each.address, each) for each in recorded_cases(calls)]
            else:
                cases = [(name, read(name, trace)) for name in names]
        except (ValueError, OSError) as error:
            raise pytest.UsageError(str(error)) from error
        metafunc.parametrize(("scenario_name", "draft" if is_draft else "case"), cases, ids=[name for name, _ in cases])
    if "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", implementation_names(metafunc.config))


def implementation_names(config: pytest.Config) -> list[str]:
    """The command line's implementations, "all" being those that have a kernel on this machine; or the default ones."""
    if not _takes_all(config):
        return list(config.getoption("--lab-implementation") or IMPLEMENTATIONS)
    return [name for name, reasons in _reasons().items() if None in reasons]


def _takes_all(config: pytest.Config) -> bool:
    return ALL in (config.getoption("--lab-implementation") or ())


def _reasons() -> dict[str, list[str | None]]:
    """Why each implementation of a forward pass' calls has no kernel of a call here, call by call; None where it has one."""
    capability = capability_of(torch.device("cuda")) if HAS_GPU else None
    found: dict[str, list[str | None]] = {}
    for call in (AttentionCall.DECODE, AttentionCall.CONTEXT):
        for name, reason in modules_of(call, capability).items():
            found.setdefault(name, []).append(reason)
    return found


def _not_here() -> list[dict[str, Any]]:
    return [
        {"scenario": None, "implementation": name, "reason": reasons[0]}
        for name, reasons in _reasons().items()
        if None not in reasons
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is timed on the GPU reads the device's clock, whose name in the JSON is the method.

    A kind of benchmark of which the command line names no scenario is left out.
    """
    unnamed = [item for item in items if item.get_closest_marker("skip") and "scenario_name" in _parameters(item)]
    if config.getoption("--lab-scenario") or config.getoption("--lab-calls"):  # nobody asked for another
        unnamed += [item for item in items if _is_benchmark(item) and "scenario_name" not in _parameters(item)]
    if unnamed:
        config.hook.pytest_deselected(items=unnamed)
        items[:] = [item for item in items if item not in unnamed]
    for item in items:
        if "gpu_benchmark" in getattr(item, "fixturenames", ()):
            method = config.stash[METHOD]
            if "warm_method" in item.fixturenames:  # type: ignore[attr-defined]
                method = replace(method, l2=L2.WARM)
            item.add_marker(pytest.mark.benchmark(timer=config.stash[CLOCKS][method]))
            item.add_marker(pytest.mark.gpu)
            if not HAS_GPU:
                reason = "a kernel's time needs a GPU, and there is none here: kernels are judged, not timed"
                item.add_marker(pytest.mark.skip(reason=reason))


def _is_benchmark(item: pytest.Item) -> bool:
    return item.path.is_relative_to(Path(__file__).parent)


def _parameters(item: pytest.Item) -> tuple[str, ...]:
    return tuple(item.callspec.params) if hasattr(item, "callspec") else ()


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    ceilings = config.stash.get(CEILINGS, None)
    machine_info["lab"] = environment() | {"ceilings": None if ceilings is None else ceilings.facts()}


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    output_json["not_timed"] = config.stash[NOT_TIMED]


def write_rows(config: pytest.Config) -> None:
    """Write the rows so far as pytest-benchmark writes all of them at the end, which a run that is ended does not see."""
    if config.option.benchmark_json is None:
        return
    machine_info: dict[str, Any] = {}
    pytest_benchmark_update_machine_info(config, machine_info)
    rows = [
        {
            "name": row["scenario"],
            "fullname": f"{row['scenario']} {row.get('implementation', '')}",
            "stats": {"data": [sample * 1e-6 for sample in row["samples_us"]]},
            "extra_info": row,
        }
        for row in config.stash[TIMED]
    ]
    content = {"machine_info": machine_info, "benchmarks": rows, "not_timed": config.stash[NOT_TIMED]}
    Path(config.option.benchmark_json).write_text(json.dumps(content) + "\n")


def _trace(config: pytest.Config) -> list[TracedRequest]:
    """The trace that scenarios draw from: the command line's, or the lab's own synthetic one."""
    path = config.getoption("--lab-trace")
    return own_trace() if path is None else read_trace(Path(path))


@pytest.fixture
def implementation_module(implementation: str) -> Any:
    return load(implementation)


@pytest.fixture
def method(request: pytest.FixtureRequest) -> Method:
    return request.config.stash[METHOD]


@pytest.fixture
def warm_method(method: Method) -> Method:
    """The command line's clock with a warm L2: what reads and writes a few kilobytes cannot be cold by rotation."""
    return replace(method, l2=L2.WARM)


@pytest.fixture(scope="session")
def ceilings(request: pytest.FixtureRequest) -> Ceilings:
    """What this GPU gives in this run."""
    request.config.stash[CEILINGS] = measure_ceilings(torch.device("cuda"))
    return request.config.stash[CEILINGS]


Timer = Callable[[str, TimedCase, Method, str], TimedPass]


@pytest.fixture(scope="session")
def timed_in_turns(request: pytest.FixtureRequest, ceilings: Ceilings) -> Timer:
    """Time a scenario on all implementations of this run, in turns, when the first of them asks; skip one that declines it."""
    config = request.config
    names = implementation_names(config)
    before = bindings()
    modules = [load(name) for name in names]

    @functools.lru_cache(maxsize=1)
    def all_of(scenario_name: str, case: TimedCase, method: Method) -> dict[str, TimedPass | Exception]:
        found: dict[str, TimedPass | Exception] = {}
        try:
            timed = time_interleaved(case, modules, method, config.getoption("lab_seed", None))
            before.check()
            found = dict(zip(names, timed, strict=True))
        except (ChangedBindingsError, RefusedTimeError) as error:
            found = dict.fromkeys(names, error)
        for name, each in found.items():
            try:
                if not isinstance(each, Exception):
                    found[name] = each[0], with_time_facts(each[1], each[0], ceilings)
            except RefusedTimeError as error:
                found[name] = error
        config.stash[NOT_TIMED] += [
            {"scenario": scenario_name, "implementation": name, "reason": _reason(each)}
            for name, each in found.items()
            if isinstance(each, Exception)
        ]
        return found

    def timed(scenario_name: str, case: TimedCase, method: Method, implementation: str) -> TimedPass:
        found = all_of(scenario_name, case, method)[implementation]
        if isinstance(found, DeclinedError):
            pytest.skip(str(found))
        if isinstance(found, Exception):
            raise found
        return found

    return timed


def _reason(error: Exception) -> str:
    if isinstance(error, DeclinedError):
        return str(error)
    first_line = str(error).partition("\n")[0]
    if isinstance(error, RefusedTimeError | ChangedBindingsError):
        return f"refused: {first_line}"
    return f"wrong: {first_line}" if isinstance(error, AssertionError) else f"{type(error).__name__}: {first_line}"


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Callable[[Any, ForwardCase], CaseVerdict]:
    """Judge a case: skip with the reason if it is declined, fail if it is wrong; and put it into the summary."""

    def judged(implementation: Any, case: ForwardCase) -> CaseVerdict:
        verdict = judge_forward(implementation, case)
        if verdict.outcome.value == "declined":
            pytest.skip(verdict.reason)
        request.config.stash[JUDGED].append(verdict)
        assert verdict.outcome.value == "right", f"{verdict}\n  reproduce with: {reproduction(verdict)}"
        return verdict

    return judged


def with_time_facts(facts: dict[str, Any], time: GpuTime, ceilings: Ceilings) -> dict[str, Any]:
    """The facts of a row with those of its time; raises RefusedTimeError."""
    return facts | time_facts(time, ceilings, facts["bytes_moved"], facts["operations"], facts.get("kv_dtype", ""))


@pytest.fixture
def gpu_benchmark(request: pytest.FixtureRequest, benchmark: Any) -> Iterator[Callable[..., None]]:
    """Hand a measured GPU time to pytest-benchmark, with its facts. A test that passes without doing so fails."""
    clocks, recorded = request.config.stash[CLOCKS], []

    def handed_over(time: GpuTime, ceilings: Ceilings, facts: dict[str, Any]) -> None:
        facts = facts if "median_us" in facts else with_time_facts(facts, time, ceilings)
        benchmark.extra_info.update(facts)
        clock, samples = clocks[time.method], iter(time.samples_us)
        benchmark.pedantic(lambda: clock.advance(next(samples) * 1e-6), rounds=len(time.samples_us))
        recorded.append(facts)

    yield handed_over
    request.config.stash[TIMED].extend(recorded)
    if recorded:
        write_rows(request.config)
    if not recorded and not request.node.stash.get(ENDED_EARLY, False):
        pytest.fail("this benchmark timed nothing", pytrace=False)


ENDED_EARLY = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Let the fixtures know whether their test failed or was skipped: then it is right that it timed nothing."""
    report = yield
    if call.when == "call" and call.excinfo is not None:
        item.stash[ENDED_EARLY] = True
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash[JUDGED]:
        where = "on this GPU" if HAS_GPU else "not timed: no GPU here, the interpreter's time is not a kernel's"
        terminalreporter.write_line("\n" + judged_table(config.stash[JUDGED], where))
    if config.stash[TIMED]:
        terminalreporter.write_line("\n" + timed_tables(config.stash[TIMED], config.stash[CEILINGS]))
