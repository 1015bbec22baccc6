"""The base class of studies: a question, the measured points that answer it, and the tables of the answer.

A study is a module with a frozen dataclass derived from `Study`. The module's docstring begins with the question. The fields of
the dataclass are the study's settings, and the options of its command. Several variants measure each of its points. They are
interleaved in one process, each on its own copies of the same pool, query and output. The output of each pass is judged by the
requests' histories before and after it is timed, and a wrong variant has no time.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from rich.progress import track

from lab.commands.options import L2, Clock, list_option
from lab.exit_status import ExitStatus
from lab.files import write_text
from lab.provenance import environment
from lab.ranges import POSITIVE
from lab.reports.tables import FittedTable, Table, terminal
from lab.timing.method import method_named
from lab.timing.roofline import Ceilings, measure_ceilings
from lab.workloads.traces import TracedRequest, own_trace, read_trace
from studies.passes import gpu_works
from studies.recording import Recorded, StudyRow
from studies.variants import OUTCOMES, FactsOf, Point, TimingPlan, measure_point

# Types of settings: each has the option that a study's command reads it from, with its help.
Samples = Annotated[int, typer.Option(min=1, help="samples of each GPU time")]
Modules = Annotated[tuple[str, ...], typer.Argument(help="modules to time; if left out, those of the study")]
Scenarios = Annotated[tuple[str, ...], list_option(str, "scenarios to time instead of the default ones", "NAME,...")]


def count(help_text: str) -> Any:
    return typer.Option(min=1, help=help_text)


def sizes(help_text: str) -> Any:
    return list_option(POSITIVE.read, help_text, "N,N,...")


def times_us(help_text: str, default: str) -> Any:
    return list_option(float, f"{help_text}, µs", "US,US,...", default=default)


def names(points: str) -> Any:
    return list_option(str, f"measure only {points}", "NAME,...")


def requests_of(path: Path | None) -> list[TracedRequest]:
    """Return the requests of a trace file; for None, those of the lab's own trace."""
    return own_trace() if path is None else read_trace(path)


def trace_name(path: Path | None) -> str:
    return "synthetic_chat.jsonl, the lab's own" if path is None else path.name


@dataclass(frozen=True)
class Part:
    """Points that are measured one after another. `rows_at` measures one point, and returns lists of rows by their names."""

    points: Collection[Any]
    rows_at: Callable[[Any], Mapping[str, Sequence[StudyRow]]]
    what: str = "points"


class Study(ABC):
    """One question. Subclasses are frozen dataclasses whose fields are annotated with command-line options. `lists` are the
    names of the recorded lists of rows. `settings` is the dataclass that has the options, if not the study itself.
    """

    lists: ClassVar[tuple[str, ...]]
    settings: ClassVar[type | None] = None

    @classmethod
    def of(cls, **values: Any) -> "Study":
        return cls(**values)

    @classmethod
    def name(cls) -> str:
        return cls.__module__.rpartition(".")[2]

    @property
    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return the points to measure. Needs no GPU. Raises ValueError for a point that is unknown or cannot be measured."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the names of the modules that the user chose, which must be importable."""
        return ()

    @property
    def ceilings(self) -> Ceilings | None:
        """Return the rates that the GPU reaches, for the recording."""
        return None

    def method(self) -> Mapping[str, Any]:
        return {}

    def facts(self) -> Mapping[str, Any]:
        return {}

    def derived(self, result: Recorded) -> Mapping[str, Any]:
        """Return facts that are computed from all recorded rows. It is called after every point."""
        return {}

    def answer(self, result: Recorded) -> Iterable[Table | str]:
        """Return the tables and lines that are printed at the end."""
        return ()

    def exit_status(self, result: Recorded) -> ExitStatus:
        """Return the exit status of the command: WRONG if the output of a variant was wrong."""
        return ExitStatus.WRONG if result.get("wrong") else ExitStatus.DONE

    def run(self, out: Path | None = None) -> ExitStatus:
        """Measure all points, write `out` anew after each, print the answer, and return the exit status of the command."""
        ceilings = {} if self.ceilings is None else {"ceilings": self.ceilings.facts()}
        rows: dict[str, list[StudyRow]] = {name: [] for name in self.lists}
        result: dict[str, Any] = {"experiment": self.name(), "environment": environment() | ceilings}
        result |= {**self.method(), **self.facts(), **rows}
        console = terminal()
        for part in self.parts:
            for point in track(part.points, description=part.what, console=console):
                for name, found in part.rows_at(point).items():
                    rows[name] += found
                result |= self.derived(result)
                if out is not None:
                    write_text(out, json.dumps(result, indent=1) + "\n")
                torch.cuda.empty_cache()  # points differ in size, and what one leaves in pieces is of no use to the next
        for each in self.answer(result):
            console.print(FittedTable(each) if isinstance(each, Table) else each)
        for outcome in OUTCOMES[1:]:
            for row in result.get(outcome, ()):
                console.print(f"{outcome}: {row['point']}, {row['arm']}: {row['reason']}")
        return self.exit_status(result)


@dataclass(frozen=True, kw_only=True)
class TimedStudy(Study):
    """A study of GPU times, and the method that takes them."""

    lists: ClassVar[tuple[str, ...]] = OUTCOMES

    clock: Clock = "graph"
    l2: L2 = "cold"
    samples: Samples = 15

    @cached_property
    def plan(self) -> TimingPlan:
        return TimingPlan(measure_ceilings(torch.device("cuda")), method_named(self.clock, self.l2), self.samples)

    def passes(self, points: Collection[Point], facts_of: FactsOf) -> Part:
        return Part(points, lambda point: measure_point(point, gpu_works, self.plan, facts_of).by_list())

    @property
    def ceilings(self) -> Ceilings:
        return self.plan.ceilings

    def method(self) -> Mapping[str, Any]:
        return {"method": str(self.plan.method), "samples": self.samples}
