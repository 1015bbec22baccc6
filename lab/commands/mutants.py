"""`lab mutants`: which of the judge's checks finds which mutant."""

from pathlib import Path
from typing import Annotated

import typer

from lab.commands.options import DONE, WRONG, misused, prepare_machine, several


def mutants(
    out: Annotated[Path, typer.Option(dir_okay=False, help="JSON; a table is written beside it, .md")],
    only: Annotated[list[str] | None, several(str, "names of mutants; all if left out", "NAME,...")] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes that judge at a time")] = 2,
) -> None:
    """Judge every mutant by every check, and record which finds which: half an hour of two cores.

    Exit status: 1 if a mutant lives or a check finds none.
    """
    prepare_machine("cpu")
    from lab.checks.matrix import write_matrix
    from lab.checks.mutants import MUTANTS, mutant

    with misused():
        chosen = [mutant(name) for name in only] if only else list(MUTANTS)
    raise typer.Exit(DONE if write_matrix(out, chosen, workers) else WRONG)
