"""Define `lab record`, which records a server's attention calls, and `lab recorded`, which makes files from them."""

import json
import math
import os
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from lab.commands.options import Device, list_option, one_call, prepare_machine, refuse, refusing_errors
from lab.exit_status import ExitStatus
from lab.loading import load
from lab.wording import counted, printable

Recording = Annotated[str, typer.Argument(metavar="FOLDER[#3]", help="a folder of recorded calls, or one call")]
recorded = typer.Typer(no_args_is_help=True)


def record(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="the server's command line")],
    out: Annotated[Path, Option(file_okay=False, help="the folder of the recorded calls")],
    functions: Annotated[list[str], list_option(str, "packages with the functions", "NAME,...", default="flashinfer")],
    every: Annotated[int, Option(min=1, help="record one of each n chosen calls, drawn at random")] = 1,
    layers: Annotated[list[int] | None, list_option(int, "record calls of these layers; all if left out")] = None,
    from_s: Annotated[float, Option(min=0, help="begin this number of seconds after FlashInfer's first import")] = 0,
    until_s: Annotated[
        float, Option(min=0, help="end this number of seconds after it", show_default="never")
    ] = math.inf,
    longest: Annotated[int, Option(min=0, help="record calls with a request of at least this number of keys")] = 0,
    non_finite: Annotated[bool, Option("--non-finite", help="record calls with NaN or Inf in the output")] = False,
    shadow: Annotated[int, Option(min=0, help="in place of --every: judge one of each n calls, record wrong ones")] = 0,
    e4m3_arithmetic: Annotated[bool, Option("--e4m3-arithmetic", help="--shadow: the kernel rounds to e4m3")] = False,
    before: Annotated[bool, Option("--before", help="write inputs before each call, in case it crashes")] = False,
    most_calls: Annotated[int, Option(min=1, help="the most calls of each process")] = 1000,
    most_gb: Annotated[float, Option(min=0, help="the most gigabytes of each process")] = 20.0,
) -> None:
    """Run a command, and record FlashInfer's attention calls in all its Python processes for `lab judge --calls`.

    The exit status is that of the command. A call's file has data of users, but only the pages of K and V that the call reads.
    """
    from lab.recorded import start
    from lab.recorded.recorder import ENVIRONMENT, Triggers

    if (program := shutil.which(command[0])) is None:
        refuse(f"there is no command {command[0]}")
    limits = {"most_calls": most_calls, "most_bytes": int(most_gb * 1e9), "before": before}
    with refusing_errors():
        chosen = tuple(layers or ())
        triggers = Triggers(every, chosen, from_s, until_s, longest, non_finite, shadow, e4m3_arithmetic)
        settings = {"out": str(out.resolve()), "triggers": asdict(triggers), "functions": functions, **limits}
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    path = os.pathsep.join(filter(None, (*start.__path__, os.environ.get("PYTHONPATH"))))
    typer.echo(f"lab: recording into {out}; afterwards judge with lab judge --calls {shlex.quote(str(out))}", err=True)
    os.execve(program, command, {**os.environ, ENVIRONMENT: json.dumps(settings), "PYTHONPATH": path})


@recorded.callback()
def about() -> None:
    """Turn calls that were recorded in an engine into programs that repeat them, drafts of bug reports, and traces."""


@recorded.command()
def shrink(
    recording: Recording,
    out: Annotated[Path, Option(file_okay=False, help="the folder of repro.py and ISSUE.md")] = Path("repro"),
    implementation: Annotated[str | None, Option(help="package.module or file.py; FlashInfer's if left out")] = None,
    device: Device = None,
    from_outputs: Annotated[
        bool, Option("--from-outputs", help="make no calls: keep as few wrong requests as possible")
    ] = False,
    synthetic: Annotated[bool, Option("--synthetic", help="draw all contents, even if the error goes away")] = False,
) -> None:
    """Find the smallest call that is wrong for the same reason as a recorded call, and write a program that makes this call
    with FlashInfer alone.

    Ctrl-C ends the search. Then the smallest call that was found so far is written.
    """
    case = one_call(recording)
    with refusing_errors():
        call = case.read()
    if not from_outputs:
        prepare_machine(device)
    import torch

    from lab.calls import CALL_TYPES
    from lab.checks.run.judging import device_of
    from lab.provenance import version_of
    from lab.recorded import own_form
    from lab.recorded.call import fault_by_calling, recorded_fault
    from lab.recorded.repro import write_repro
    from lab.recorded.shrink import contents_of, shrunk

    name, function = implementation or CALL_TYPES[call.function].module, call.function.value
    if implementation is None and not from_outputs and not torch.cuda.is_available():
        why = "FlashInfer's functions need a GPU, and there is none here"
        refuse(f"{why}: --implementation names one for the CPU, --from-outputs makes no calls", ExitStatus.NOT_JUDGED)
    with refusing_errors():
        if from_outputs:
            smaller, fault = shrunk(call, recorded_fault, synthetic)
            called, versions = "", {"GPU": call.gpu or "(please fill in)", **call.versions}
        else:
            if (kernel := getattr(load(name), function, None)) is None:
                raise ValueError(f"{name} has no {function}")
            find = partial(fault_by_calling, kernel, device_of(device))
            smaller, fault = shrunk(call, find, synthetic)
            called, versions = name.rpartition("/")[2], {"GPU": own_form.gpu() or "none", **own_form.versions()}
            if (package := sys.modules.get(name.partition(".")[0])) is not None:
                found = getattr(package, "__version__", None) or version_of(package.__name__)
                versions[package.__name__] = str(found or "")
        write_repro(out, smaller, fault, versions, called)
    typer.echo(f"written to {out}: ISSUE.md, repro.py{' and repro.pt, which it reads' * (out / 'repro.pt').exists()}")
    if fault is not None:
        typer.echo(printable(f"{fault.reason.value}: {fault.sentence}"))
    else:
        unknown = "whether the result is wrong with drawn contents is not known, because no call was made: run repro.py"
        typer.echo(unknown if from_outputs else "with drawn contents the result is right")
    if kept := [name for name in contents_of(smaller) if name not in smaller.drawn]:
        typer.echo(f"{out} holds recorded contents of {', '.join(kept)}: --synthetic replaces them")
    if implementation is not None:
        typer.echo(f"repro.py calls FlashInfer: to call {implementation}, replace the import of {function}")


@recorded.command()
def scenario(
    recording: Recording,
    out: Annotated[Path, Option(dir_okay=False, help="the trace, in Mooncake's format")] = Path("trace.jsonl"),
) -> None:
    """Write the lengths of recorded requests as a trace. Scenarios such as decode/llama-3.1-8b/trace8 take batches from it."""
    from lab.files import write_text
    from lab.recorded.case import recorded_cases, traced_requests
    from lab.workloads.traces import as_mooncake

    with refusing_errors():
        if out.suffix != ".jsonl":
            raise ValueError(f"{out}: a trace in Mooncake's format ends in .jsonl")
        cases = recorded_cases(recording)
        requests = traced_requests(cases, lambda why: typer.echo(printable(f"left out: {why}"), err=True))
        write_text(out, as_mooncake(requests))
    passes = Counter(each.arrival_ms for each in requests)
    print(f"{out}: {counted(len(passes), 'forward pass')} of up to {max(passes.values())} requests")
