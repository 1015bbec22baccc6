"""`lab mutants`: record the mutants that each of the judge's checks finds."""

from pathlib import Path
from typing import Annotated

import typer

from lab.commands.options import list_option, prepare_machine, refusing_errors
from lab.exit_status import ExitStatus


def mutants(
    out: Annotated[
        Path, typer.Option(dir_okay=False, help="the JSON file to write; a Markdown table is written next to it")
    ],
    only: Annotated[list[str] | None, list_option(str, "names of mutants; all if left out", "NAME,...")] = None,
    workers: Annotated[int, typer.Option(min=1, help="worker processes that judge at the same time")] = 2,
) -> None:
    """Judge every mutant by every check, and record the mutants that each check finds. It takes about an hour on two cores.

    Exit status: 1 if a mutant is found by no check or, without --only, a check finds no mutant.
    """
    prepare_machine("cpu")
    from corpus.kernels import MUTANTS, kernel
    from corpus.matrix import write_matrix

    with refusing_errors():
        chosen = [kernel(name) for name in only] if only else [*MUTANTS.values()]
    raise typer.Exit(ExitStatus.DONE if write_matrix(out, chosen, workers) else ExitStatus.WRONG)
