"""Define `lab checks`, which lists the judge's checks, and `lab implementations`, which lists the kernels for this machine."""

from lab.commands.options import ProfileKey, prepare_machine


def checks(profile: ProfileKey = None) -> None:
    """List the judge's checks: key, name, and the defects that each check finds.

    With --profile, list the values of each parameter that an engine sends, and the lines of the engine's code that send them.
    """
    from lab.checks.parameters.profiles import profiles
    from lab.checks.properties import checks as catalogue
    from lab.reports.tables import table_of_lines, terminal, terminal_of

    if profile is None:
        lines = [(check.key, check.name, check.catches) for check in catalogue()]
        terminal().print(terminal_of(table_of_lines(("key", "name", "finds"), lines)))
        return
    engine = profiles()[profile]
    rows = [
        (functions, name, each.values or "not sent", each.remark, each.source)
        for functions, parameters in engine.functions.items()
        for name, each in parameters.items()
    ]
    headings = ("functions", "parameter", "values", "remark", f"source in {engine.folder}")
    terminal().print(terminal_of(table_of_lines(headings, rows, caption=f"What {engine} sends")))


def implementations() -> None:
    """List the implementations of FlashInfer's calls, each with the kernel that this machine would run, or why it runs none."""
    import torch

    from lab.gpus import capability_of
    from lab.kernels.support import availabilities
    from lab.provenance import version_of
    from lab.reports.tables import FittedTable, table_of_lines, terminal, words

    prepare_machine(None)
    lines = []
    for each in availabilities(capability_of(torch.device("cuda")) if torch.cuda.is_available() else None):
        package = each.implementation.distribution
        number = version_of(package)
        here = words(each.why_not or " or ".join(each.kernels), "same" if each.why_not else "faster")
        of = words(number and f"{package} {number}")
        lines.append((each.implementation.module, of, each.function.name.lower(), here))
    terminal().print(FittedTable(table_of_lines(("implementation", "of", "call", "here"), lines)))
