"""`lab checks`: list what the judge checks."""

from rich.console import Console
from rich.table import Table


def checks() -> None:
    """List the judge's checks: key, name, and the defects that each finds."""
    from lab.checks.properties import checks as catalogue

    table = Table("key", "name", "finds", box=None, pad_edge=False)
    for check in catalogue():
        table.add_row(check.key, check.name, check.catches)
    Console().print(table)
