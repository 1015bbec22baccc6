"""Define `lab bench`, which runs the benchmarks of the lab's checkout."""

from pathlib import Path
from typing import Annotated

import typer

import lab
from lab.commands.options import TimedCalls, refuse, refusing_errors
from lab.exit_status import ExitStatus

# The index is pytest's own exit status, 0 to 5.
STATUS_BY_PYTEST = (
    ExitStatus.DONE,  # all passed
    ExitStatus.WRONG,  # some failed
    ExitStatus.INTERRUPTED,
    ExitStatus.NOT_JUDGED,  # internal error
    ExitStatus.MISUSED,
    ExitStatus.MISUSED,  # no test selected
)
RECORDING = Path(".benchmarks/last_run.json")


def bench(
    context: typer.Context,
    implementations: Annotated[
        str,
        typer.Option(
            metavar="all|A,B,...", help="modules to time, in turns; all: every one that has a kernel on this machine"
        ),
    ] = "",
    calls: TimedCalls = None,
) -> None:
    """Time the default scenarios or recorded calls on the GPU. Without a GPU, only check the scenarios' results.

    The samples of several implementations are interleaved within a scenario. All other options go to pytest: pytest's own
    options, those of pytest-benchmark, and --lab-scenario, --lab-implementation, --lab-clock, --lab-l2 and --lab-trace
    (docs/time.md). The times are written to .benchmarks/last_run.json, or to the file of --benchmark-json.
    """
    from lab.extras import require

    require("lab bench", "pytest_benchmark", "triton")
    checkout = Path(lab.__file__).parents[1]
    if not (checkout / "tests" / "benchmarks").is_dir():
        refuse(
            "the benchmarks are in the lab's checkout: install the lab there with pip install --editable '.[bench,triton]'"
        )
    if calls is not None:
        from lab.recorded.case import recorded_cases

        with refusing_errors():
            recorded_cases(calls)
    import pytest

    RECORDING.parent.mkdir(exist_ok=True)
    options = ["--benchmark-only", "--benchmark-columns=median,iqr,rounds", f"--benchmark-json={RECORDING}"]
    options += [f"--lab-calls={calls}"] if calls is not None else []
    options += [f"--lab-implementation={name}" for name in filter(None, implementations.split(","))]
    status = pytest.main([str(checkout / "tests" / "benchmarks"), *options, *context.args])
    raise typer.Exit(STATUS_BY_PYTEST[int(status)])
