"""Measure SGLang's five changes on this machine's GPU, or read their recordings; then show the overview."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lab.exit_status import ExitStatus
from lab.files import write_text
from lab.reports.tables import terminal, terminal_of
from studies import command_of
from studies.changes import CHANGES, Change
from studies.changes.entries import file_of, read_entries
from studies.changes.overview import PAGE, claims_table, kernels_sentence, page

RECORDED = Path(__file__).parents[2] / "results" / "nvidia-h200"
DEFAULT_OUT = Path(".benchmarks/experiments")

Run = Callable[[Sequence[str]], int]


def run_command(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False).returncode


def measure(changes: Sequence[Change], folder: Path, run: Run = run_command) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    failures = {}
    for change in changes:
        out = file_of(folder, change.module)
        out.unlink(missing_ok=True)  # what an earlier run recorded is not shown as this one's
        command = command_of(change.module)
        print(f"{change.number} {change.title}: {command}", flush=True)
        status = run([sys.executable, "-m", *command.split(), "--out", str(out)])
        if status != ExitStatus.DONE:
            failures[change.module] = f"its command ended with exit status {status}"
    return failures


def show(recorded: Path | None, out: Path | None, only: Sequence[int] = (), run: Run = run_command) -> ExitStatus:
    """Measure SGLang's five changes, or read their recordings, and show the overview.

    Args:
        recorded: the folder of the recordings. None: measure; without a GPU, show the recordings in the lab's checkout.
        out: the folder for the recordings and the overview's page. None with `recorded`: no page is written.

    Raises:
        ValueError: `only` has a number that no change has, or `out` is a file.
    """
    numbers = [change.number for change in CHANGES]
    if unknown := set(only) - set(numbers):
        raise ValueError(f"there is no change {min(unknown)}; there are {', '.join(map(str, numbers))}")
    if out is not None and out.suffix in (".md", ".json"):
        raise ValueError(f"--out {out}: a folder is wanted; {PAGE} is written into it")
    out = DEFAULT_OUT if recorded is None and out is None else out
    changes = [change for change in CHANGES if not only or change.number in only]
    failures: dict[str, str] = {}
    if recorded is None and out is not None and torch.cuda.is_available():
        recorded = out
        failures = measure(changes, out, run)
    elif recorded is None:
        recorded = RECORDED
        shown = recorded.relative_to(Path.cwd()) if recorded.is_relative_to(Path.cwd()) else recorded
        print(f"No CUDA GPU here, so nothing is measured. This is what was recorded in {shown}.", flush=True)
    entries = read_entries(recorded, changes, failures)
    if not any(entry.answer or entry.failure for entry in entries):
        print(f"no overview: {recorded} holds none of the recordings", file=sys.stderr)
        return ExitStatus.NOT_JUDGED
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / PAGE, page(entries, out))
    console = terminal()
    console.print(terminal_of(claims_table(entries), show_lines=True))
    console.print(kernels_sentence(entries))
    if out is not None:
        console.print(f"the page: {out / PAGE}")
    return ExitStatus.WRONG if any(entry.failure for entry in entries) else ExitStatus.DONE
