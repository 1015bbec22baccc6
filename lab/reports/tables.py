"""Define tables as data, and print them in a terminal and in Markdown. `lab.reports.html` shows them on a page."""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from lab.exit_status import ExitStatus
from lab.files import write_text
from lab.wording import UNPRINTABLE, in_markdown, printable

ABSENT = "–"
# The width for output that is not a terminal; a row of a table fits in it.
WIDTH_WITHOUT_TERMINAL = 160
SHOWN_DIGITS = 5  # significant digits; a cell of the page also has the unrounded number
WIDER_THAN_ANY = 10_000  # columns of a terminal
MOST_LISTED = 8  # longer lists of numbers are samples, which a table does not show
# Terminal styles by a cell's style. A page has CSS classes of the same names.
TERMINAL_STYLES = {
    **dict.fromkeys(("faster", "right"), "green"),
    **dict.fromkeys(("unsure", "known"), "yellow"),
    **dict.fromkeys(("same", "declined"), "dim"),
    **dict.fromkeys(("wrong", "failed", "dishonest"), "bold red"),
    "slower": "red",
    "refused": "magenta",
}

Group = TypeVar("Group")
Member = TypeVar("Member")


@dataclass(frozen=True)
class Cell:
    text: str  #: the shown text; the unit is in the column's heading
    number: float | None = None  #: the unrounded value, by which the page sorts; None for words
    style: str = ""  #: names of styles separated by spaces, such as "slower" or "long code"; "" for none
    #: (text, id of an HTML element) of each link within the page, which shows the links instead of the text
    links: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", printable(self.text))


@dataclass(frozen=True)
class Column:
    heading: str  # with the unit
    is_number: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "heading", printable(self.heading))


@dataclass(frozen=True)
class Table:
    """A table as data, for a terminal, Markdown or HTML."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    name: str = ""  #: an id that is unique on a page
    caption: str = ""  #: words that say what one row is
    #: heading and text of each column that is not shown, because it has the same text in every row
    common: tuple[tuple[str, str], ...] = ()
    #: headings of columns that are not shown, because their values are too long for cells
    left_out: tuple[str, ...] = ()


Columns = Mapping[str, Callable[[Any], Cell]]  # by heading: a function that returns a record's cell in this column


def grouped(pairs: Iterable[tuple[Group, Member]]) -> dict[Group, list[Member]]:
    """Return the members of each group, in the order of the pairs (group, member)."""
    found: dict[Group, list[Member]] = {}
    for group, member in pairs:
        found.setdefault(group, []).append(member)
    return found


def words(value: Any, style: str = "") -> Cell:
    """Return a cell that shows a value as text, or a dash for None and "". `style` has names of styles, such as "slower"."""
    return Cell(ABSENT if value is None or value == "" else str(value), style=style)


def number(value: float | None, digits: int | None = None, scale: float = 1.0) -> Cell:
    """Return a cell that shows `value * scale` with `digits` decimals; None: an int in full, a float with few digits."""
    if value is None:
        return Cell(ABSENT)
    scaled = value * scale if scale != 1 else value
    if digits is None and isinstance(scaled, int):
        return Cell(f"{scaled:,}", scaled)
    if digits is None and abs(scaled) < 10**SHOWN_DIGITS - 0.5:
        return Cell(f"{scaled:,.{SHOWN_DIGITS}g}", scaled)
    return Cell(f"{scaled:,.{digits or 0}f}", scaled)


def in_short(size: int) -> str:
    """Return a size with a binary unit if it is a multiple of one, such as "4K" for 4096 and "1M" for 2**20."""
    unit, name = next((each for each in ((2**20, "M"), (2**10, "K")) if size and size % each[0] == 0), (1, ""))
    return f"{size // unit:,}{name}"


def make_table(
    columns: Columns,
    records: Sequence[Any],
    *,
    name: str = "",
    caption: str = "",
    say_once: Collection[str] | None = None,
    left_out: Iterable[str] = (),
) -> Table:
    """Make a table with one row per record. Columns that are empty in every row are omitted.

    A column with the same text in every row is moved to `Table.common` if its heading is in `say_once` (None: if the table
    has at least two rows). `left_out` has the headings of columns that are not shown, because their values are too long.
    """
    made = {heading: [cell(record) for record in records] for heading, cell in columns.items()}
    filled = {name: cells for name, cells in made.items() if any(shown(cell) not in ("", ABSENT) for cell in cells)}
    may_be_once = (filled if len(records) > 1 else ()) if say_once is None else say_once
    common = [heading for heading, cells in filled.items() if heading in may_be_once and len({*map(shown, cells)}) == 1]
    kept = {heading: cells for heading, cells in filled.items() if heading not in common}
    are_numbers = [all(each.number is not None or each.text == ABSENT for each in cells) for cells in kept.values()]
    return Table(
        tuple(map(Column, kept, are_numbers)),
        tuple(zip(*kept.values(), strict=True)),
        name,
        caption,
        tuple((heading, filled[heading][0].text) for heading in common),
        tuple(left_out),
    )


def table_of_lines(headings: Sequence[str], lines: Sequence[Sequence[str | Cell]], caption: str = "") -> Table:
    """Make a table from rows of texts or cells. Columns that are empty in every row are omitted."""
    cells = [[each if isinstance(each, Cell) else Cell(each) for each in line] for line in lines]
    columns = {heading: itemgetter(place) for place, heading in enumerate(headings)}
    return make_table(columns, cells, caption=caption, say_once=())


def table_of_records(name: str, caption: str, records: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table of JSON objects, with one column per key. A key with a long list in some object has no column."""
    flat = [flattened(record) for record in records]
    keys = dict.fromkeys(key for record in flat for key in record)
    long = [key for key in keys if any(_is_long(record.get(key)) for record in flat)]

    def place(key: str) -> int:
        is_number = all(type(record.get(key)) in (int, float, type(None)) for record in flat)
        return 0 if not is_number else 1 if key.endswith("_us") else 2

    columns = {key: partial(_cell_at, key) for key in sorted((key for key in keys if key not in long), key=place)}
    return make_table(columns, flat, name=name, caption=caption, left_out=long)


def flattened(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: {"a": {"b": 1}} becomes {"a.b": 1}. `prefix` is put before each key."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        named = f"{prefix}{key}"
        flat |= flattened(value, f"{named}.") if isinstance(value, Mapping) else {named: value}
    return flat


def _cell_at(key: str, record: Mapping[str, Any]) -> Cell:
    value = record.get(key)
    if isinstance(value, list):
        return words(", ".join(map(str, value)))
    if isinstance(value, bool):
        return words("yes" if value else "no")
    return number(value) if isinstance(value, int | float) else words(value)


def _is_long(value: Any) -> bool:
    is_list = isinstance(value, list)
    return is_list and (len(value) > MOST_LISTED or any(isinstance(each, list | Mapping) for each in value))


def shown(cell: Cell) -> str:
    return " ".join(text for text, _ in cell.links) or cell.text


def markdown_of(table: Table) -> str:
    lines = [[column.heading for column in table.columns], ["---"] * len(table.columns)]
    lines += [[cell.text for cell in row] for row in table.rows]
    return "\n".join(
        f"| {' | '.join(in_markdown(text).replace('|', chr(92) + '|') for text in line)} |" for line in lines
    )


def terminal_of(table: Table, show_lines: bool = False) -> Any:
    """Convert a table to one of the package rich, without `common` and `left_out`. `show_lines`: lines separate the rows."""
    from rich.box import SIMPLE, SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(
        title=Text(printable(table.caption)) if table.caption else None,
        title_justify="left",
        box=SIMPLE if show_lines else SIMPLE_HEAD,
        show_lines=show_lines,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in table.columns:
        side: Any = "right" if column.is_number else "left"
        made.add_column(Text(column.heading), justify=side, overflow="fold", no_wrap=column.is_number)
    for row in table.rows:
        made.add_row(*(Text(shown(cell), style=TERMINAL_STYLES.get(cell.style, "")) for cell in row))
    return made


@dataclass(frozen=True)
class FittedTable:
    """A table for a terminal of any width. In a narrow terminal each row takes two lines: its words, then its numbers."""

    table: Table

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.measure import Measurement
        from rich.text import Text

        wide = terminal_of(self.table)
        needed = Measurement.get(console, options.update(max_width=WIDER_THAN_ANY), wide).maximum
        num_names = next((place for place, column in enumerate(self.table.columns) if column.is_number), 0)
        if needed <= options.max_width or num_names == 0:
            yield wide
            return
        lines = (tuple(Cell(column.heading) for column in self.table.columns), *self.table.rows)
        widths = [max(len(shown(cell)) for cell in cells) for cells in zip(*lines, strict=True)]
        for line in lines:
            yield Text(", ".join(filter(None, map(shown, line[:num_names]))), style="bold", overflow="fold")
            figures = Text("  ", overflow="fold")
            for cell, column, width in list(zip(line, self.table.columns, widths, strict=True))[num_names:]:
                padded = shown(cell).rjust(width) if column.is_number else shown(cell).ljust(width)
                figures.append(padded, TERMINAL_STYLES.get(cell.style)).append("  ")
            figures.rstrip()
            yield figures


@dataclass(frozen=True)
class TableReport:
    """The output of a command: a table, the lines above and below it, and the same content as JSON data."""

    above: tuple[str, ...]
    table: Table
    below: tuple[str, ...]  #: the last line is the summary
    record: Mapping[str, Any]  #: the content as JSON data
    exit_status: ExitStatus = ExitStatus.DONE
    title: str = ""  #: the first line; in Markdown, a heading
    #: lines between the table and `below`, each with how to reproduce it or ""; in Markdown a table
    findings: tuple[tuple[str, str], ...] = ()

    def show(self, json_to: str | None = None, markdown_to: str | None = None) -> None:
        """Write the report as JSON and as Markdown to these files; "-" is standard output. Also print it to the terminal,
        unless standard output has the JSON or the Markdown.
        """
        for target, written in ((json_to, self.json), (markdown_to, self.markdown)):
            if target == "-":
                print(written(), end="")
            elif target is not None:
                write_text(Path(target), written())
        if "-" not in (json_to, markdown_to):
            console = terminal()
            print_lines(console, (*filter(None, (self.title,)), *self.above))
            if self.table.rows:
                console.print(FittedTable(self.table))
            print_lines(console, (line for pair in self.findings for line in filter(None, pair)))
            print_lines(console, self.below)

    def json(self) -> str:
        text = json.dumps({**self.record, "exit_status": self.exit_status}, indent=1, ensure_ascii=False)
        # JSON itself does not escape DEL and C1 control characters, which a terminal executes.
        return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"

    def markdown(self) -> str:
        *remarks, summary = self.below
        title = self.title and f"# {in_markdown(self.title)}"
        lines = [[text.strip() for text in each] for each in self.findings]
        findings = table_of_lines(("what was found", "how to reproduce it"), lines)
        tables = [markdown_of(table) for table in (self.table, findings) if table.rows]
        return (
            "\n\n".join(filter(None, (title, in_markdown(summary), *tables, items(remarks), items(self.above)))) + "\n"
        )


def items(lines: Iterable[str]) -> str:
    """Return a Markdown list of the lines. An indented line is an item below the line before it."""
    return "\n".join(f"{'  ' * line.startswith(' ')}* {in_markdown(line.strip())}" for line in lines)


def print_lines(console: Any, lines: Iterable[str], style: str = "") -> None:
    """Print lines without wrapping them. Control characters are printed as escape sequences, rich's markup as plain text."""
    from rich.text import Text

    for line in lines:
        console.print(Text(printable(line), style), soft_wrap=True)


def terminal() -> Any:
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(markup=False, highlight=False, width=width)
