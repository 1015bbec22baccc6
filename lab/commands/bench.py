"""`lab bench`: run the benchmarks of the lab's checkout."""

from pathlib import Path

import typer

import lab
from lab.commands.options import DONE, INTERRUPTED, MISUSED, NOT_JUDGED, WRONG, refuse

# pytest's exit statuses, in order: all passed, some failed, interrupted, its own error, wrongly used, nothing selected.
STATUSES = (DONE, WRONG, INTERRUPTED, NOT_JUDGED, MISUSED, MISUSED)
RECORDING = Path(".benchmarks/last_run.json")


def bench(context: typer.Context) -> None:
    """Time the default scenarios on the GPU; without one, judge what would be timed.

    All options are pytest's, pytest-benchmark's and the lab's own: --lab-scenario, --lab-implementation, --lab-clock, --lab-l2,
    --lab-trace; see docs/time.md. The recording goes to .benchmarks/last_run.json unless --benchmark-json says where.
    """
    from lab.extras import require

    require("lab bench", "pytest_benchmark")
    checkout = Path(lab.__file__).parents[1]
    if not (checkout / "tests" / "benchmarks").is_dir():
        refuse("the benchmarks are in the lab's checkout, and this lab is installed without it: see docs/install.md")
    import pytest

    RECORDING.parent.mkdir(exist_ok=True)
    words = ["--benchmark-only", "--benchmark-columns=median,iqr,rounds", f"--benchmark-json={RECORDING}"]
    status = pytest.main([str(checkout / "tests" / "benchmarks"), *words, *context.args])
    raise typer.Exit(STATUSES[int(status)])
