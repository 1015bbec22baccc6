"""What several commands share: kinds of options, exit statuses, refusals, and the preparation of this machine."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from lab.loading import LoadError, load

# Exit statuses of every command: done or right, wrong, wrongly used, could not be judged, ended by Ctrl-C.
DONE, WRONG, MISUSED, NOT_JUDGED, INTERRUPTED = 0, 1, 2, 125, 130


def refuse(sentence: str, status: int = MISUSED) -> NoReturn:
    """End the command with a sentence on stderr.

    Raises:
        typer.Exit: always.
    """
    typer.echo(f"lab: {sentence}", err=True)
    raise typer.Exit(status)


def several(of: Callable[[str], Any], words: str, metavar: str = "A,B,...", panel: str | None = None) -> Any:
    """Return an option of several values: separated by commas, or the option several times.

    Args:
        of: makes a value of its text; its ValueError is shown.
        words: the help.
        metavar: stands for the values in the help.
        panel: the part of the help that it goes into.
    """

    def parse(text: str) -> list[Any]:
        try:
            return [of(each.strip()) for each in text.split(",")]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    def flat(given: list[list[Any]] | None) -> list[Any] | None:
        return [value for values in given for value in values] if given else None

    return typer.Option(parser=parse, callback=flat, help=words, metavar=metavar, rich_help_panel=panel)


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

    count = torch.cuda.device_count()
    if device is not None and device.startswith("cuda") and int(device.partition(":")[2] or 0) >= count:
        refuse(f"there is no GPU {device} here: torch finds {count or 'none'}")
    if (device == "cpu" or not count) and os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"  # worker processes inherit it
        typer.echo("Triton's kernels run on the CPU, in Triton's interpreter: TRITON_INTERPRET=1 is set", err=True)
