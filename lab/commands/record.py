"""`lab record`: run a server, and record the attention calls that it makes."""

import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from lab.commands.options import list_option, refuse, refusing_errors


def record(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="the server's command line")],
    out: Annotated[Path, Option(file_okay=False, help="the folder of the recorded calls")],
    functions: Annotated[
        list[str], list_option(str, "packages that have the functions", "NAME,...", default="flashinfer")
    ],
    every: Annotated[int, Option(min=1, help="record one of each n calls of the chosen layers, drawn at random")] = 1,
    layers: Annotated[list[int] | None, list_option(int, "record calls of these layers; all if left out")] = None,
    from_s: Annotated[
        float, Option(min=0, help="begin this number of seconds after the first import of FlashInfer")
    ] = 0,
    until_s: Annotated[
        float, Option(min=0, help="end this number of seconds after that import", show_default="never")
    ] = math.inf,
    longest: Annotated[
        int, Option(min=0, help="record calls whose longest request has at least this number of keys")
    ] = 0,
    non_finite: Annotated[bool, Option("--non-finite", help="record calls with NaN or Inf in the output")] = False,
    shadow: Annotated[
        int,
        Option(min=0, help="in place of --every: judge one of each n calls at once, record it if it is wrong; 0: none"),
    ] = 0,
    e4m3_arithmetic: Annotated[
        bool, Option("--e4m3-arithmetic", help="--shadow: the kernel rounds its operands to e4m3")
    ] = False,
    switch: Annotated[
        Path | None, Option("--while", metavar="FILE", help="record calls only while this file exists")
    ] = None,
    before: Annotated[
        bool, Option("--before", help="write the inputs before each call, for a call that crashes")
    ] = False,
    most_calls: Annotated[int, Option(min=1, help="the most calls of each process")] = 1000,
    most_gb: Annotated[float, Option(min=0, help="the most gigabytes of each process")] = 20.0,
) -> None:
    """Run a command, and record FlashInfer's attention calls in all its Python processes for `lab judge --calls`.

    The exit status is the command's. A file has only the pages of K and V that its call reads; it contains data of the users'
    requests.
    """
    from lab.recorded import start
    from lab.recorded.recorder import ENVIRONMENT, Triggers

    chosen = tuple(layers or ())
    with refusing_errors():
        seen = "" if switch is None else str(switch.resolve())
        triggers = Triggers(every, chosen, from_s, until_s, longest, non_finite, shadow, e4m3_arithmetic, seen)
    limits = {"most_calls": most_calls, "most_bytes": int(most_gb * 1e9), "before": before}
    settings = {"out": str(out.resolve()), "triggers": asdict(triggers), "functions": functions, **limits}
    if (program := shutil.which(command[0])) is None:
        refuse(f"there is no command {command[0]}")
    with refusing_errors():
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    path = os.pathsep.join(filter(None, (*start.__path__, os.environ.get("PYTHONPATH"))))
    typer.echo(f"lab: recording into {out}; afterwards judge with lab judge --calls {out}", err=True)
    os.execve(program, command, {**os.environ, ENVIRONMENT: json.dumps(settings), "PYTHONPATH": path})
