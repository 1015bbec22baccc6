"""Judge an implementation: `python -m lab.checks package.module`."""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lab.checks.catalogue import checks
from lab.checks.check import Level
from lab.checks.isolation import load
from lab.checks.judge import TIME_LIMIT_S, interfaces_of, judge
from lab.checks.report import CaseVerdict, Report
from lab.checks.space import Space
from lab.checks.verdicts import Outcome
from lab.kernels import default_implementation
from lab.workloads.geometries import GEOMETRIES
from lab.workloads.interfaces import Interface

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
NUMBERS = (
    "groups",
    "num_kv_heads",
    "head_dims",
    "page_sizes",
    "q_lens",
    "large_batches",
    "masked_rows",
    "mla_heads",
    "mla_page_sizes",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Judge, print, record. The exit status is 1 if anything is wrong, or nothing could be judged, of a function it has.

    It is 2, with a sentence, if there is nothing to judge.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    console = Console()
    implementation = given.implementation or default_implementation().__name__
    try:
        offered = interfaces_of(load(implementation))
    except (ImportError, AttributeError) as error:
        parser.error(f"{implementation} cannot be imported: {error}")
    if not offered:
        parser.error(f"{implementation} has none of {', '.join(interface.value for interface in Interface)}")
    report = _judge(given, implementation, console)
    console.print(report.table())
    for detail in report.details():
        console.print(detail, markup=False, highlight=False, soft_wrap=True)
    if given.out is not None:
        report.write(given.out)
    if report.left_out:
        console.print(f"{report.left_out} cases were left out: the time was over")
    console.print("right" if report.is_right else "not right")
    return 0 if report.is_right else 1


def _judge(given: argparse.Namespace, implementation: str, console: Console) -> Report:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting")

        def tell(verdict: CaseVerdict) -> None:
            progress.update(task, advance=1, description=f"{verdict.check} of {verdict.interface.value}")
            if verdict.outcome in (Outcome.WRONG, Outcome.FAILED) and not verdict.drawn:
                progress.console.print(f"{verdict.check} of {verdict.interface.value} is {verdict.outcome.value}")

        return judge(
            implementation,
            level=Level(given.level),
            space=_space(given),
            only=given.only,
            functions=given.functions,
            device=given.device,
            isolated=not given.in_process,
            workers=given.workers,
            time_limit_s=given.time_limit_s,
            most_seconds=given.most_seconds,
            drawn=given.drawn,
            progress=tell if console.is_terminal else None,
        )


def _space(given: argparse.Namespace) -> Space:
    """The default axes, narrowed by what was given."""
    several = (*NUMBERS, "dtypes", "geometries", "kv_layouts")
    chosen: dict[str, Any] = {name: tuple(getattr(given, name)) for name in several if getattr(given, name)}
    for name in ("windows", "sinks", "nvfp4"):
        if getattr(given, f"no_{name}"):
            chosen[name] = (False,)
    chosen["e4m3_arithmetic"] = given.e4m3_arithmetic
    if given.longest:
        chosen["longest"] = given.longest
    return Space(**chosen)


def _dtypes(pair: str) -> tuple[torch.dtype, torch.dtype]:
    query, _, cache = pair.partition("/")
    if not {query, cache} <= set(DTYPES):
        raise argparse.ArgumentTypeError(f"{pair!r} is no pair such as bf16/e4m3, of {', '.join(DTYPES)}")
    return DTYPES[query], DTYPES[cache]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.checks",
        description=__doc__.split("\n", 1)[0],
        epilog="checks: " + "; ".join(f"{check.key} {check.name}: {check.catches}" for check in checks()),
    )
    parser.add_argument(
        "implementation",
        nargs="?",
        help="package.module, or package.module:attribute; what fits the machine if left out",
    )
    parser.add_argument("--level", choices=[level.value for level in Level], default=Level.SMOKE.value)
    named = [name for check in checks() for name in (check.key, check.key.lower(), check.name)]
    parser.add_argument("--only", nargs="+", default=[], choices=named, metavar="CHECK", help="keys or names of checks")
    parser.add_argument(
        "--functions",
        nargs="+",
        default=[],
        choices=[each.value for each in Interface],
        help="all that it has if left out",
    )
    parser.add_argument("--device", help="cpu or cuda; a GPU if there is one")
    parser.add_argument("--in-process", action="store_true", help="no worker: a crash or a hang ends the judge")
    parser.add_argument("--time-limit-s", type=float, default=TIME_LIMIT_S, help="of one case, %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="processes that judge at a time, %(default)s")
    parser.add_argument("--most-seconds", type=float, default=math.inf, help="begin no further case after so long")
    parser.add_argument("--drawn", type=int, help="cases that Hypothesis draws per check and function")
    parser.add_argument("--out", type=Path, help="where to write the report, JSON")
    axes = parser.add_argument_group("axes", "narrow the cases to what the kernel was built for")
    names = {each.name for each in fields(Space)}
    for name in NUMBERS:
        assert name in names
        axes.add_argument(f"--{name.replace('_', '-')}", nargs="+", type=int)
    axes.add_argument("--dtypes", nargs="+", type=_dtypes, metavar="Q/KV", help="pairs such as bf16/bf16 and bf16/e4m3")
    axes.add_argument(
        "--geometries", nargs="+", choices=sorted(GEOMETRIES), help="of the full level's passes and graph stories"
    )
    axes.add_argument("--kv-layouts", nargs="+", choices=("HND", "NHD"))
    axes.add_argument(
        "--e4m3-arithmetic", action="store_true", help="it is known to compute in e4m3 over an e4m3 cache"
    )
    axes.add_argument("--longest", type=int, help="keys of the longest request, about")
    axes.add_argument("--no-windows", action="store_true")
    axes.add_argument("--no-sinks", action="store_true")
    axes.add_argument("--no-nvfp4", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
