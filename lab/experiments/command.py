"""The command line that experiments share."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from lab.experiments.arms import SAMPLES, TimingPlan
from lab.timing.method import L2, Clock, Method, method_named
from lab.timing.roofline import measure_ceilings
from lab.workloads.traces import TracedRequest, own_trace, read_trace

Named = TypeVar("Named")


class ExperimentParser(argparse.ArgumentParser):
    """A parser with the one option that all experiments have, `--out`, and with methods that add those that several have.

    Args:
        name: the experiment's.
        doc: its module's docstring, whose first line is the question.
    """

    def __init__(self, name: str, doc: str) -> None:
        super().__init__(prog=f"python -m lab.experiments.{name}", description=doc.split("\n", 1)[0])
        self.add_argument(
            "--out", type=Path, help="where the JSON goes, written anew after each point; nowhere if left out"
        )

    def add_sizes(self, option: str, defaults: Sequence[int], words: str) -> None:
        """Add an option of one or more sizes, each at least 1, which say what the points are."""
        shown = " ".join(map(str, defaults))
        self.add_argument(option, type=positive, nargs="+", default=list(defaults), help=f"{words} ({shown})")

    def add_only(self, words: str) -> None:
        """Add the option that leaves out all points but those it names."""
        self.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"measure only {words}")

    def add_timing(self, method: Method, samples: int = SAMPLES) -> None:
        """Add the options of GPU times, which `timing_plan` reads: clock, state of L2, samples."""
        clocks, l2 = [clock.value for clock in Clock], "warm" if method.l2 is L2.WARM else "cold"
        self.add_argument("--clock", choices=clocks, default=method.clock.value, help="of GPU times (%(default)s)")
        self.add_argument("--l2", choices=("cold", "warm"), default=l2, help="before each call (%(default)s)")
        self.add_argument("--samples", type=positive, default=samples, help="of each GPU time (%(default)s)")

    def add_trace(self) -> None:
        """Add the option of a trace, which `trace_of` reads."""
        words = "a Mooncake (.jsonl) or Azure (.csv) trace; the lab's own if left out"
        self.add_argument("--trace", type=Path, help=words)

    def parsed(self, argv: Sequence[str] | None, **made: Callable[[Any], Any]) -> Any:
        """Parse a command line, and add to it what is made of it.

        Args:
            argv: the arguments; those of the process if None.
            made: by attribute, what is made of all that is given; its ValueError or OSError is an error of the command line.
        """
        given = self.parse_args(argv)
        try:
            for name, make in made.items():
                setattr(given, name, make(given))
        except (ValueError, OSError) as error:
            self.error(str(error))
        return given


def positive(text: str) -> int:
    """Read a number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def chosen(points: Iterable[Named], only: Sequence[str], name_of: Callable[[Named], str]) -> list[Named]:
    """Return the points that `--only` names, in their own order; all of them if it names none.

    Raises:
        ValueError: a name is no point's.
    """
    listed = list(points)
    unknown = sorted(set(only) - {name_of(point) for point in listed})
    if unknown:
        raise ValueError(f"no point is called {unknown[0]!r}; there are {', '.join(map(name_of, listed))}")
    return [point for point in listed if not only or name_of(point) in only]


def timing_plan(given: argparse.Namespace) -> TimingPlan:
    """Return how GPU times are taken by the command line, with what the GPU reaches now."""
    return TimingPlan(measure_ceilings(torch.device("cuda")), method_named(given.clock, given.l2), given.samples)


def trace_of(given: argparse.Namespace) -> list[TracedRequest]:
    """Read the trace of the command line.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no trace.
    """
    return own_trace() if given.trace is None else read_trace(given.trace)


def trace_name(given: argparse.Namespace) -> str:
    """Return what a recording says of its trace."""
    return "synthetic_chat.jsonl, the lab's own" if given.trace is None else str(given.trace.name)
