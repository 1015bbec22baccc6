"""Assemble the command `lab` from its subcommands."""

import os
import sys
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import lab
from lab.commands.budget import budget
from lab.commands.dry_run import dry_run
from lab.commands.invariance import invariance
from lab.commands.judge import judge, merge
from lab.commands.lists import checks, implementations
from lab.commands.recorded import record, recorded
from lab.commands.timing import ab, bench, compare, html, releases, report


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            errors = getattr(error.__cause__, "errors", None)
            if errors is not None:  # pydantic's words do not quote the value
                rule = error.message.removeprefix("Value error, ").partition(", unable")[0]
                error.message = rule.replace("Input should be", f"{errors()[0]['input']} must be")
            raise


app = typer.Typer(
    name="lab",
    cls=_Commands,
    help="Is an LLM attention kernel right, and how far is it from the hardware's limit?",
    epilog="Exit status: 0 right or done, 1 wrong, 2 wrongly used, 3 refused, 125 could not be judged, 130 ended by Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"lab {lab.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Put the current folder on the module search path, as `python -m` does. Typer calls this before each command."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


JUDGING, TIMING, RECORDED = "Is it right?", "Is it fast?", "What was recorded"
PANELS = {
    JUDGING: (judge, invariance, budget, checks, implementations, record),
    TIMING: (bench, ab, dry_run),
    RECORDED: (compare, releases, merge, report, html),
}
app.add_typer(recorded, name="recorded", rich_help_panel=RECORDED)
TO_PYTEST = {"allow_extra_args": True, "ignore_unknown_options": True}  # all options of `lab bench` except its own
for panel, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel, context_settings=TO_PYTEST if command is bench else None)(command)
# Commands of the folders `studies` and `corpus` of a checkout, which a wheel does not contain.
for of_checkout in entry_points(group="lab.commands"):
    with suppress(ModuleNotFoundError):
        command = of_checkout.load()
        if isinstance(command, typer.Typer):  # a group of commands
            app.add_typer(command, name=of_checkout.name, rich_help_panel=TIMING)
        else:
            app.command(rich_help_panel=JUDGING)(command)
