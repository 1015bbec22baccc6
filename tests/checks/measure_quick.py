"""Measure how many wrong kernels the quick level finds.

    python -m tests.checks.measure_quick --count 120 --seed 1 --cpu-seconds 24

Kernels are drawn from the blind sets of the corpus, and each is judged in this process until its first wrong case. The time is
the process's own CPU time, so that other work on the machine does not count. Two workers that begin no case after 17 seconds,
of which their start takes 5, have 24 CPU seconds.
"""

import argparse
import random
import time
from collections.abc import Sequence
from unittest import mock

import torch

from corpus.kernels import BLIND
from lab.checks import Level, judge
from lab.checks.run.verdicts import BROKEN


def finds(name: str, cpu_seconds: float) -> bool:
    """Return True if the quick level finds the wrong kernel with this name within a CPU time."""
    with mock.patch.object(time, "monotonic", time.process_time):
        report = judge(
            BLIND[name].implementation(),
            level=Level.QUICK,
            most_seconds=cpu_seconds,
            first_failure=True,
            device="cpu",
        )
    return any(verdict.outcome in BROKEN for verdict in report.verdicts)


def main(argv: Sequence[str] | None = None) -> None:
    """Print each kernel that the quick level misses, then how many it found."""
    parser = argparse.ArgumentParser(prog="python -m tests.checks.measure_quick")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu-seconds", type=float, default=24.0)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    drawn = random.Random(given.seed).sample(sorted(BLIND), given.count)
    missed = []
    for name in drawn:
        if not finds(name, given.cpu_seconds):
            missed.append(name)
            print(f"missed: {name}: {BLIND[name].defect}", flush=True)
    found = given.count - len(missed)
    print(f"The quick level found {found} of {given.count} wrong kernels ({found / given.count:.0%}).")


if __name__ == "__main__":
    main()
