"""`lab experiments`: one command per study, with the study's settings as options, and a command for SGLang's five changes."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from lab.commands.options import Out, list_option, need_gpu, prepare_machine, refuse, refusing_errors
from lab.exit_status import ExitStatus
from lab.loading import load
from lab.ranges import POSITIVE
from studies import STUDIES, WITHOUT_GPU, question_of, study_named


class StudyGroup(TyperGroup):
    """The group of the studies' commands. A study is imported only when its command is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*(name.replace("_", "-") for name in STUDIES), *super().list_commands(ctx)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if _study_of(args[0]) in WITHOUT_GPU and not {"-h", "--help"} & {*args}:
            prepare_machine()
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        name = _study_of(cmd_name)
        if name not in STUDIES:
            return super().get_command(ctx, cmd_name)
        made = typer.Typer(add_completion=False)
        made.command(name=cmd_name, help=question_of(name))(_command_of(name))
        return typer.main.get_command(made)


def _study_of(command: str) -> str:
    return command.replace("-", "_")


experiments = typer.Typer(
    cls=StudyGroup, help="Put questions to this machine's GPU, and record the answers.", no_args_is_help=True
)


def _command_of(name: str) -> Callable[..., None]:
    study = study_named(name)

    def command(out: Path | None = None, **values: Any) -> None:
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        with refusing_errors():
            chosen = study.of(**{key: value for key, value in given.items() if value is not None})
            chosen.parts  # noqa: B018 a setting may name a point that there is not
        if name not in WITHOUT_GPU:
            need_gpu()
        with refusing_errors():
            for module in chosen.modules:
                load(module)
        try:
            raise typer.Exit(chosen.run(out))
        except NotImplementedError as error:
            refuse(f"not run: {error}", ExitStatus.NOT_JUDGED)

    file = Parameter("out", Parameter.KEYWORD_ONLY, default=None, annotation=Out)
    command.__signature__ = inspect.Signature([*_parameters(study.settings or study), file])  # type: ignore[attr-defined]
    command.__annotations__ = {}  # those of the signature hold
    return command


def _parameters(settings: type) -> Iterator[Parameter]:
    """Yield a command's parameter for each setting of a study. A setting with several values is a list in the command."""
    hints = get_type_hints(settings, include_extras=True)
    for field in fields(settings):
        kind, option = get_args(hints[field.name])
        default = Parameter.empty if field.default is MISSING else field.default
        if get_origin(kind) is tuple and get_args(kind)[0] is str:
            kind = list[str]
        elif get_origin(kind) is tuple or default is Parameter.empty:
            kind = list[Any]  # the option has a parser
        if isinstance(default, tuple):
            option = copy.copy(option)
            option.show_default = ",".join(map(_text, default)) or False
            kind, default = kind | None, None
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@experiments.command()
def changes(
    recorded: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="measure nothing, and show the recordings of this folder"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="the folder for the recordings and experiments.md",
            show_default=".benchmarks/experiments",
        ),
    ] = None,
    only: Annotated[
        list[int] | None, list_option(POSITIVE.read, "numbers of SGLang's changes; all if left out", "NUMBER,...")
    ] = None,
) -> None:
    """Measure five changes of SGLang one after the other, or show their recordings."""
    from studies.changes.run import show

    with refusing_errors():
        raise typer.Exit(show(recorded, out, only or ()))
