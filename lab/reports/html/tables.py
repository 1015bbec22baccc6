"""Tables as data: cells that are shown as text and sorted as what they are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ABSENT = "–"
SHOWN_DIGITS = 5  # significant ones; the page's cells hold the whole number beside it
MOST_LISTED = 8  # longer lists of numbers are samples, and stay in their file


@dataclass(frozen=True)
class Link:
    """A link within the page: its words, and the id of what it leads to."""

    text: str
    target: str


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: what is shown.
        number: what it is sorted by, unrounded; None for words.
        style: a CSS class, "" for none.
        links: shown in place of the text.
    """

    text: str
    number: float | None = None
    style: str = ""
    links: tuple[Link, ...] = ()


@dataclass(frozen=True)
class Column:
    """A heading, and whether all that is below it are numbers."""

    heading: str
    is_number: bool


@dataclass(frozen=True)
class Table:
    """A table, and what is the same in all its rows and therefore said once.

    Attributes:
        name: an id, unique in the page.
        caption: what the rows are.
        columns, rows: as shown.
        common: heading and text of the columns that say the same in every row.
        left_out: headings of what is too long for a cell.
    """

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    common: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()


def words(value: Any, style: str = "") -> Cell:
    """A cell of words; None is shown as a dash."""
    return Cell(ABSENT if value is None or value == "" else str(value), style=style)


def number(value: float | None, digits: int | None = None, scale: float = 1.0) -> Cell:
    """A cell of a number, with so many decimals, or with `SHOWN_DIGITS` significant digits; None is shown as a dash."""
    if value is None:
        return Cell(ABSENT)
    scaled = value * scale if scale != 1 else value
    return Cell(_significant(scaled) if digits is None else f"{scaled:,.{digits}f}", scaled)


def make_table(
    name: str,
    caption: str,
    columns: Mapping[str, Callable[[Any], Cell]],
    records: Sequence[Any],
    left_out: Iterable[str] = (),
) -> Table:
    """One row per record. Columns that say nothing are dropped; those that say one thing throughout go to `common`.

    Args:
        columns: by heading, what is shown of a record.
    """
    made = {heading: [cell(record) for record in records] for heading, cell in columns.items()}
    said = {heading: cells for heading, cells in made.items() if any(_shown(cell) != ABSENT for cell in cells)}
    common = [heading for heading, cells in said.items() if len(cells) > 1 and len({*map(_shown, cells)}) == 1]
    kept = {heading: cells for heading, cells in said.items() if heading not in common}
    return Table(
        name,
        caption,
        tuple(Column(heading, _all_numbers(cells)) for heading, cells in kept.items()),
        tuple(zip(*kept.values(), strict=True)),
        tuple((heading, said[heading][0].text) for heading in common),
        tuple(left_out),
    )


def table_of_records(name: str, caption: str, records: Sequence[Mapping[str, Any]]) -> Table:
    """Recorded rows as they are: a column per key, "outer.inner" of mappings within them; long lists are left out.

    Words come first, then times, then other numbers: rows have more columns than a page is wide.
    """
    flat = [flattened(record) for record in records]
    keys = dict.fromkeys(key for record in flat for key in record)
    long = [key for key in keys if any(_is_long(record.get(key)) for record in flat)]

    def place(key: str) -> int:
        is_number = all(type(record.get(key)) in (int, float, type(None)) for record in flat)
        return 0 if not is_number else 1 if key.endswith("_us") else 2

    columns = {key: _cell_at(key) for key in sorted((key for key in keys if key not in long), key=place)}
    return make_table(name, caption, columns, flat, left_out=long)


def flattened(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Mappings within a mapping, taken out: {"a": {"b": 1}} is {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _cell_at(key: str) -> Callable[[Mapping[str, Any]], Cell]:
    def cell(record: Mapping[str, Any]) -> Cell:
        value = record.get(key)
        if isinstance(value, list):
            return words(", ".join(map(str, value)))
        if isinstance(value, bool):
            return words("yes" if value else "no")
        return number(value) if isinstance(value, int | float) else words(value)

    return cell


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and (
        len(value) > MOST_LISTED or any(isinstance(each, list | Mapping) for each in value)
    )


def _shown(cell: Cell) -> str:
    return " ".join(link.text for link in cell.links) or cell.text


def _all_numbers(cells: Sequence[Cell]) -> bool:
    return all(cell.number is not None or cell.text == ABSENT for cell in cells)


def _significant(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.{SHOWN_DIGITS}g}" if abs(value) < 10**SHOWN_DIGITS else f"{value:,.0f}"
