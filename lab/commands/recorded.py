"""`lab recorded`: what can be made of calls that were recorded in an engine."""

import typer

recorded = typer.Typer(no_args_is_help=True)


@recorded.callback()
def about() -> None:
    """Make files from calls that were recorded in an engine."""
