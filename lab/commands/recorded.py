"""`lab recorded`: make files from calls that were recorded in an engine."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from lab.commands.options import Device, prepare_machine, refuse, refusing_errors
from lab.exit_status import ExitStatus
from lab.loading import load
from lab.wording import counted, printable

MOST_SHOWN = 8  # sentences about calls and requests that are left out
recorded = typer.Typer(no_args_is_help=True)


@recorded.callback()
def about() -> None:
    """Make files from calls that were recorded in an engine."""


@recorded.command()
def shrink(
    recording: Annotated[
        str, typer.Argument(metavar="FOLDER#3", help="a folder of recorded calls, and a call's number")
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="the folder of repro.py and ISSUE.md")] = Path("repro"),
    implementation: Annotated[
        str | None,
        typer.Option(help="what is called: package.module or path/to/file.py; FlashInfer's function if left out"),
    ] = None,
    device: Device = None,
    from_outputs: Annotated[
        bool, typer.Option("--from-outputs", help="make no calls: keep as few wrong requests as possible")
    ] = False,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="replace all contents by drawn ones, even if the error then goes away")
    ] = False,
    most_seconds: Annotated[float, typer.Option(min=0, help="try no smaller call after this time")] = 600.0,
) -> None:
    """Find the smallest call that is wrong like a recorded call, and write a program that makes it with FlashInfer alone."""
    import torch

    from lab.recorded.case import recorded_cases

    with refusing_errors():
        cases = recorded_cases(recording)
        if len(cases) > 1:
            raise ValueError(f"{recording} has {len(cases)} calls: name one, such as {recording}#{cases[0].number}")
        call = cases[0].read()
    if implementation is None and not from_outputs and not torch.cuda.is_available():
        why = "FlashInfer's functions need a GPU, and there is none here"
        refuse(f"{why}: --implementation names one for the CPU, --from-outputs makes no calls", ExitStatus.NOT_JUDGED)
    if not from_outputs:
        prepare_machine(device)
    from lab.calls import CALL_TYPES
    from lab.checks.run.judge import device_of
    from lab.provenance import version_of
    from lab.recorded import own_form
    from lab.recorded.reductions import contents_of
    from lab.recorded.repro import import_line, is_foreign, write_repro
    from lab.recorded.shrink import fault_by_calling, recorded_fault, shrunk

    with refusing_errors():
        find, called, versions, gpu = None, "", dict(call.versions), call.gpu or "(please fill in)"
        if not from_outputs:
            name = implementation or (call.module if is_foreign(call.module) else CALL_TYPES[call.function].module)
            function = getattr(load(name), call.function.value, None)
            if function is None:
                raise ValueError(f"{name} has no {call.function.value}")
            find, called = fault_by_calling(function, device_of(device)), name.rpartition("/")[2]
            package = called.partition(":")[0].partition(".")[0]
            versions, gpu = {package: version_of(package) or ""} | own_form.versions(), own_form.gpu() or "none"
        versions = {"GPU": gpu} | {name: version.split()[0] for name, version in versions.items() if version}
        smaller, fault = shrunk(call, find, synthetic, most_seconds)
        holder = write_repro(out, smaller, fault, versions, called)
    typer.echo(f"written to {out}: ISSUE.md, repro.py{' and repro.pt, which it reads' * (holder != 'repro.py')}")
    if from_outputs and (whole := recorded_fault(call)) and whole.requests:
        kept_requests = fault.requests if fault else smaller.problem().batch_size
        typer.echo(f"kept {kept_requests} of {counted(whole.requests, 'wrong request')}")
    if fault is not None:
        typer.echo(printable(f"{fault.reason.value}: {fault.sentence}"))
    else:
        unknown = "whether the result is wrong with drawn contents is not known, because no call was made: run repro.py"
        typer.echo(unknown if from_outputs else "with drawn contents the result is right")
    if kept := [name for name in contents_of(smaller) if name not in smaller.drawn]:
        typer.echo(f"{holder} holds recorded contents of {', '.join(kept)}: --synthetic replaces them")
    if implementation is not None:
        typer.echo(f"repro.py calls FlashInfer. To call {implementation}, replace the line of this import by:")
        typer.echo(f"    {import_line(implementation, call.function.value)}")


@recorded.command()
def scenario(
    recording: Annotated[str, typer.Argument(metavar="FOLDER[#3]", help="a folder of recorded calls, or one call")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="the trace, in Mooncake's format")] = Path("trace.jsonl"),
) -> None:
    """Write the lengths of recorded requests as a trace, from which scenarios like decode/llama-3.1-8b/trace8 take batches."""
    from lab.files import write_text
    from lab.recorded.case import recorded_cases
    from lab.recorded.lengths import traced_requests
    from lab.workloads.synthetic import as_mooncake

    with refusing_errors():
        if out.suffix != ".jsonl":
            raise ValueError(f"{out}: a trace in Mooncake's format ends in .jsonl")
        left_out: list[str] = []
        requests = traced_requests(recorded_cases(recording), left_out.append)
        write_text(out, as_mooncake(requests))
    for sentence in left_out[:MOST_SHOWN]:
        typer.echo(printable(f"left out: {sentence}"), err=True)
    if len(left_out) > MOST_SHOWN:
        typer.echo(f"left out: {len(left_out) - MOST_SHOWN} more", err=True)
    passes = Counter(each.arrival_ms for each in requests)
    print(f"{out}: {counted(len(passes), 'forward pass')} of up to {max(passes.values())} requests")


@recorded.command("list")
def list_calls(
    recording: Annotated[str, typer.Argument(metavar="FOLDER[#3]", help="a folder of recorded calls, or one call")],
) -> None:
    """List recorded calls with their sizes. The rows of a request tell the verification of a draft from a decode."""
    from lab.recorded.call import RecordingError
    from lab.recorded.case import recorded_cases
    from lab.reports.tables import table_of_lines, terminal, terminal_of

    lines = []
    with refusing_errors():
        for case in recorded_cases(recording):
            try:
                _, problem = case.posed()
            except RecordingError as error:
                sizes, last = ["", "", ""], str(error)
            else:
                rows = sorted({*problem.q_lens()})
                widths = f"{rows[0]} to {rows[-1]}" if len(rows) > 1 else str(rows[0])
                sizes = [str(problem.batch_size), widths, str(int(problem.seq_lens.max()))]
                last = Path(case.path).stem.rpartition(case.interface.value)[2].strip("_")
            about = [str(case.number), case.interface.name.lower(), "" if case.layer is None else str(case.layer)]
            lines.append([*about, *sizes, printable(last)])
    headings = ("call", "function", "layer", "requests", "rows of each", "most keys", "file")
    terminal().print(terminal_of(table_of_lines(headings, lines, caption=recording)))
