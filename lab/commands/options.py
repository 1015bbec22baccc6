"""What several commands share: kinds of options, exit statuses, refusals, and the preparation of this machine."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from lab.loading import LoadError, load

if TYPE_CHECKING:
    from lab.workloads.traces import TracedRequest

# Exit statuses of every command: done or right, wrong, wrongly used, could not be judged, ended by Ctrl-C.
DONE, WRONG, MISUSED, NOT_JUDGED, INTERRUPTED = 0, 1, 2, 125, 130


def refuse(sentence: str, status: int = MISUSED) -> NoReturn:
    """End the command with a sentence on stderr.

    Raises:
        typer.Exit: always.
    """
    typer.echo(f"lab: {sentence}", err=True)
    raise typer.Exit(status)


def several(
    of: Callable[[str], Any],
    words: str,
    metavar: str = "A,B,...",
    panel: str | None = None,
    default: str | None = None,
) -> Any:
    """Return an option of several values: separated by commas, or the option several times.

    Args:
        of: makes a value of its text; its ValueError is shown.
        words: the help.
        metavar: stands for the values in the help.
        panel: the part of the help that it goes into.
        default: the values if it is left out; otherwise there are none, None.
    """

    def parse(text: str) -> list[Any]:
        try:
            return [of(each.strip()) for each in text.split(",")]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    def flat(given: list[list[Any]] | None) -> list[Any] | None:
        return [value for values in given for value in values] if given else None

    return typer.Option(
        parser=parse,
        callback=flat,
        default_factory=None if default is None else lambda: [default],
        show_default=default or False,
        help=words,
        metavar=metavar,
        rich_help_panel=panel,
    )


def device_named(text: str) -> str:
    """Read the name of a device.

    Raises:
        typer.BadParameter: it is none.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise typer.BadParameter(f"{text} is no device: cpu, cuda, or cuda:1 for the second GPU")
    return text


Implementation = typer.Argument(
    help="package.module, path/to/file.py, or either with :attribute; what fits the machine if left out"
)
Device = Annotated[
    str | None, typer.Option(parser=device_named, metavar="DEVICE", help="cpu or cuda; a GPU if there is one")
]
Out = Annotated[Path | None, typer.Option(dir_okay=False, help="where the JSON goes; nowhere if left out")]


Clock = Annotated[Literal["graph", "cupti", "events"], typer.Option(help="of GPU times")]
L2 = Annotated[Literal["cold", "warm"], typer.Option(help="the cache, before each call")]
Trace = Annotated[
    Path | None, typer.Option(help="a Mooncake (.jsonl) or Azure (.csv) trace; the lab's own if left out")
]


def traced(path: Path | None) -> "list[TracedRequest]":
    """Read the trace of a command line.

    Raises:
        OSError, ValueError: it cannot be read, or is no trace.
    """
    from lab.workloads.traces import own_trace, read_trace

    return own_trace() if path is None else read_trace(path)


def trace_name(path: Path | None) -> str:
    """Return what a recording says of its trace."""
    return "synthetic_chat.jsonl, the lab's own" if path is None else path.name


@contextmanager
def misused() -> Iterator[None]:
    """Turn an error of what was asked for into a sentence, and end the command."""
    try:
        yield
    except ValueError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def need_gpu() -> None:
    """End the command where there is no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        refuse("not measured: this needs a CUDA GPU, and there is no CUDA GPU here", NOT_JUDGED)


def loaded(name: str) -> Any:
    """Import an implementation by name, or end the command with the reason why it cannot be."""
    try:
        return load(name)
    except LoadError as error:
        refuse(str(error))


def prepare_machine(device: str | None = None) -> None:
    """Refuse a GPU that is not here, and let Triton's kernels run without one. No command imports Triton before this.

    Args:
        device: where the command's kernels run; a GPU if there is one.
    """
    import torch

    wanted = -1 if device is None or device == "cpu" else int(device.partition(":")[2] or 0)
    if wanted >= torch.cuda.device_count():
        refuse(f"there is no GPU {device} here: torch finds {torch.cuda.device_count() or 'none'}")
    if (device == "cpu" or not torch.cuda.is_available()) and os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"  # worker processes inherit it
        typer.echo("Triton's kernels run on the CPU, in Triton's interpreter: TRITON_INTERPRET=1 is set", err=True)
