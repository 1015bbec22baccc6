"""Define the options that several commands share, and functions that end a command with an error message."""

import inspect
import itertools
import os
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from lab.exit_status import ExitStatus
from lab.files import DAMAGED, read_json
from lab.loading import LoadError
from lab.names import profile_name
from lab.ranges import OPTIONS, Option, Ranges
from lab.wording import printable, shortened

SHOWN_CHARACTERS = 900  # of a sentence that ends a command
RANGES_PANEL = "Ranges: narrow the cases to what the kernel was built for"


def refuse(sentence: str, status: ExitStatus = ExitStatus.MISUSED) -> NoReturn:
    """Print an error message to stderr, cut to `SHOWN_CHARACTERS`, and end the command: raise typer.Exit with `status`."""
    typer.echo(f"lab: {shortened(printable(sentence), SHOWN_CHARACTERS)}", err=True)
    raise typer.Exit(status)


def refuse_options_without(context: typer.Context, allowed: Collection[str], sentence: str) -> None:
    """End the command with the message `sentence` if an option outside `allowed` was given, because it would be ignored."""
    sources = {name: context.get_parameter_source(name) for name in context.params.keys() - allowed}
    given = sorted(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        refuse(f"{sentence}: leave out {named}")


def _parsed(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parse


def list_option(
    read: Callable[[str], Any],
    help_text: str,
    metavar: str = "A,B,...",
    panel: str | None = None,
    default: str | None = None,
) -> Any:
    """Return an option that takes several values, separated by commas, and may be given several times.

    `read` converts the text of one value. If it raises ValueError, its message is shown. `default` is the text of the default
    values. If it is None, the default value is None.
    """

    def joined(lists: list[list[Any]] | None) -> list[Any] | None:
        return [value for values in lists for value in values] if lists else None

    return typer.Option(
        parser=_parsed(lambda text: [read(each.strip()) for each in text.split(",")]),
        callback=joined,
        default_factory=None if default is None else lambda: [default],
        show_default=default or False,
        help=help_text,
        metavar=metavar,
        rich_help_panel=panel,
    )


def with_options_of_ranges(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option to a command for each field of `lab.ranges.Ranges`. The command gets the values as keyword arguments."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    ranges = itertools.starmap(_parameter, OPTIONS.items())
    vars(command)["__signature__"] = signature.replace(parameters=[*own, *ranges])
    return command


def _parameter(name: str, option: Option) -> inspect.Parameter:
    spelt, words, kind = f"--{name.replace('_', '-')}", option.help, option.kind
    default: Any = None if option.is_several else getattr(Ranges, name)
    annotation: Any = Annotated[list[str] | None, list_option(kind.read, words, kind.metavar, RANGES_PANEL)]
    if option.is_switch:
        if option.is_several:
            default, spelt, words = True, f"{spelt}/--no-{name}", f"judge cases with {words} too"
        annotation = Annotated[bool, typer.Option(spelt, help=words, rich_help_panel=RANGES_PANEL)]
    elif not option.is_several:
        number = typer.Option(spelt, parser=_parsed(kind.read), metavar="N", help=words, rich_help_panel=RANGES_PANEL)
        annotation = Annotated[int, number]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


Implementation = typer.Argument(
    help="package.module, path/to/file.py, or either with :attribute; if left out, the lab's kernels that fit the machine, "
    "or the implementation of --case"
)
Device = Annotated[  # typer 0.27 makes "--DEVICE" of this metavar if the option is not named
    str | None, typer.Option("--device", metavar="DEVICE", help="cpu or cuda; a GPU if there is one")
]
ProfileKey = Annotated[
    str | None,
    typer.Option(
        "--profile",
        parser=_parsed(profile_name),
        metavar="ENGINE",
        help="sglang or vllm: what this engine sends, as `lab checks --profile ENGINE` lists it",
    ),
]
Out = Annotated[Path | None, typer.Option(dir_okay=False, help="the JSON file to write; none if left out")]
Json = Annotated[
    str | None, typer.Option(metavar="PATH", help="write the report there as JSON too; - prints the JSON and no table")
]
Markdown = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="write the report there as Markdown too; - prints the Markdown and no table"),
]
Clock = Annotated[Literal["graph", "cupti", "events"], typer.Option(help="the method of timing on the GPU")]
L2 = Annotated[Literal["cold", "warm"], typer.Option(help="state of the L2 cache before each call")]
Trace = Annotated[
    Path | None,
    typer.Option(help="a file of a Mooncake (.jsonl) or Azure (.csv) trace; the lab's own trace if left out"),
]
TimedCalls = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER[#3]",
        help="time calls that were recorded in an engine: their tables and lengths, other contents",
    ),
]


@contextmanager
def refusing_errors() -> Iterator[None]:
    """If the `with` block raises ValueError, OSError or LoadError, print the message to stderr and exit with MISUSED."""
    try:
        yield
    except (LoadError, ValueError) as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))


@contextmanager
def refusing_recordings(what_failed: str, *paths: Path | str) -> Iterator[None]:
    """If the block fails to read or compare recorded files, print "`what_failed`: message" to stderr and end the command. Files
    at `paths` that are not JSON end it before the block, which imports slow modules.

    The exit status is NOT_JUDGED if the files cannot be compared, else MISUSED. The block may raise any of `lab.files.DAMAGED`,
    because a file may contain any JSON.
    """
    refuse_unreadable(what_failed, *paths)
    from lab.checks.record import ReportError
    from lab.reports.recorded_file import NotComparableError, RecordedFileError

    try:
        yield
    except NotComparableError as error:
        refuse(f"{what_failed}: {error}", ExitStatus.NOT_JUDGED)
    except (RecordedFileError, ReportError) as error:
        refuse(f"{what_failed}: {error}")
    except DAMAGED as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}: {error}"
        refuse(f"{what_failed}: a file is not in the form that the lab writes ({what})")


def refuse_unreadable(what_failed: str, *paths: Path | str) -> None:
    """Exit with MISUSED and "`what_failed`: reason" if a file is not JSON."""
    for path in map(Path, paths):
        try:
            if not path.is_dir():
                read_json(path)
        except (OSError, ValueError) as error:
            refuse(f"{what_failed}: {path} cannot be read: {getattr(error, 'strerror', None) or error}")


def one_call(recording: str, hint: str = "") -> Any:
    """Return the recorded call "FOLDER#3", or the only one of "FOLDER". If it has several, exit; `hint` ends the message."""
    from lab.recorded.case import recorded_cases

    with refusing_errors():
        case, *others = recorded_cases(recording)
    if others:
        refuse(f"{recording} has {1 + len(others)} calls: name one, such as {case.address}{hint}")
    return case


def need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        refuse("not measured: this needs a CUDA GPU, and there is no CUDA GPU here", ExitStatus.NOT_JUDGED)


def prepare_machine(device: str | None = None) -> None:
    """Turn on Triton's interpreter if kernels will run on the CPU: if `device` is "cpu", or there is no GPU."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # worker processes inherit it
