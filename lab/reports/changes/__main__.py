"""Measure SGLang's five changes on this machine's GPU, or show their recordings: `python -m lab.reports.changes --help`.

    python -m lab.reports.changes --out experiments                          # on a GPU: measure all, then write the overview
    python -m lab.reports.changes --only 24566 --out experiments             # one change
    python -m lab.reports.changes --recorded results/nvidia-h200             # any machine: the overview of recordings

Measuring runs the command of each change, one after the other, with its default sizes; each leaves its JSON file in the folder,
and one that fails does not stop the others. Without a GPU the overview is that of the lab's recorded run, and says so. Exit
status: 1 if a command failed or a recording cannot be read, 2 if there is nothing to show.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lab.experiments import EXPERIMENTS
from lab.files import write_text
from lab.reports.changes import CHANGES, Change
from lab.reports.changes.entries import file_of, read_entries
from lab.reports.changes.overview import PAGE, claims_table, kernels_sentence, page
from lab.reports.tables import terminal, terminal_of

RECORDED = Path(__file__).parents[3] / "results" / "nvidia-h200"
DEFAULT_OUT = Path(".benchmarks/experiments")
SHOWN, FAILED, NOTHING_TO_SHOW = 0, 1, 2

Run = Callable[[Sequence[str]], int]


def run_command(command: Sequence[str]) -> int:
    """Run a command with this process's output; return its exit status."""
    return subprocess.run(command, check=False).returncode


def measure(changes: Sequence[Change], folder: Path, run: Run = run_command) -> dict[str, str]:
    """Run the command of each change; return by module how those ended that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = {}
    for change in changes:
        out = file_of(folder, change.module)
        out.unlink(missing_ok=True)  # what an earlier run recorded is not shown as this one's
        print(f"{change.number} {change.title}: {EXPERIMENTS[change.module]}", flush=True)
        status = run([sys.executable, "-m", EXPERIMENTS[change.module], "--out", str(out)])
        if status != 0:
            failures[change.module] = f"its command ended with exit status {status}"
    return failures


def main(argv: Sequence[str] | None = None, run: Run = run_command) -> int:
    """Run the command line; return the exit status."""
    given = _arguments(argv)
    changes = [change for change in CHANGES if not given.only or change.number in given.only]
    failures: dict[str, str] = {}
    recorded = given.recorded
    if recorded is None and torch.cuda.is_available():
        recorded = given.out
        failures = measure(changes, given.out, run)
    elif recorded is None:
        recorded = RECORDED
        print(f"No CUDA GPU here, so nothing is measured. This is what was recorded in {_shown(recorded)}.", flush=True)
    entries = read_entries(recorded, changes, failures)
    if not any(entry.answer or entry.failure for entry in entries):
        print(f"no overview: {recorded} holds none of the recordings", file=sys.stderr)
        return NOTHING_TO_SHOW
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        write_text(given.out / PAGE, page(entries, given.out))
    console = terminal()
    console.print(terminal_of(claims_table(entries), show_lines=True))
    console.print(kernels_sentence(entries))
    if given.out is not None:
        console.print(f"the page: {given.out / PAGE}")
    return FAILED if any(entry.failure for entry in entries) else SHOWN


def _shown(folder: Path) -> Path:
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.reports.changes",
        description=__doc__.split("\n", 1)[0].split(": `")[0] + ".",
        epilog="Each change's own command has options for other sizes: "
        + ", ".join(f"{EXPERIMENTS[change.module]} ({change.number})" for change in CHANGES),
    )
    parser.add_argument("--recorded", type=Path, metavar="FOLDER", help="measure nothing: show these recordings")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"where the recordings and {PAGE} go ({DEFAULT_OUT}; with --recorded nowhere)",
    )
    numbers = [change.number for change in CHANGES]
    parser.add_argument("--only", type=int, nargs="+", choices=numbers, metavar="NUMBER", help=f"of {numbers}")
    given = parser.parse_args(argv)
    if given.recorded is not None and not given.recorded.is_dir():
        parser.error(f"--recorded {given.recorded}: no such folder")
    if given.out is not None and given.out.suffix in (".md", ".json"):
        parser.error(f"--out {given.out}: a folder is wanted; {PAGE} is written into it")
    if given.recorded is None and given.out is None:
        given.out = DEFAULT_OUT
    return given


if __name__ == "__main__":
    sys.exit(main())
