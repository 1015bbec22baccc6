"""Types of a study's settings: each has the option that the study's command reads it from, with its help."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lab.commands.options import list_option
from lab.ranges import POSITIVE
from lab.workloads.traces import TracedRequest, own_trace, read_trace

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
