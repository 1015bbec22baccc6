"""`lab checks`: list what the judge checks."""


def checks() -> None:
    """List the judge's checks: key, name, and the defects that each check finds."""
    from lab.checks.properties import checks as catalogue
    from lab.reports.tables import Columns, make_table, terminal, terminal_of, words

    columns: Columns = {
        "key": lambda check: words(check.key),
        "name": lambda check: words(check.name),
        "finds": lambda check: words(check.catches),
    }
    terminal().print(terminal_of(make_table(columns, catalogue(), say_once=())))
