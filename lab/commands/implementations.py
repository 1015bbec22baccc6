"""`lab implementations`: list the kernels that run on this machine, and the requirements of the kernels that do not."""

from typing import TYPE_CHECKING

from lab.commands.options import prepare_machine

if TYPE_CHECKING:
    from lab.kernels.implementations import Availability
    from lab.reports.tables import Table


def implementations() -> None:
    """List the implementations of FlashInfer's calls: the package, the calls, and the kernel that runs here or the missing
    requirement.
    """
    import torch

    from lab.gpus import capability_of
    from lab.kernels.implementations import availabilities
    from lab.reports.tables import FittedTable, terminal

    prepare_machine(None)
    capability = capability_of(torch.device("cuda")) if torch.cuda.is_available() else None
    terminal().print(FittedTable(_table(list(availabilities(capability)))))


def _table(found: "list[Availability]") -> "Table":
    from lab.provenance import version_of
    from lab.reports.tables import Cell, make_table, words

    def version(each: "Availability") -> Cell:
        distribution = each.implementation.distribution
        number = version_of(distribution)
        return words(number and f"{distribution} {number}")

    columns = {
        "implementation": lambda each: words(each.implementation.module),
        "of": version,
        "call": lambda each: words(each.function.name.lower()),
        "here": lambda each: words(each.why_not or " or ".join(each.kernels), "same" if each.why_not else "faster"),
    }
    return make_table(columns, found, say_once=())
