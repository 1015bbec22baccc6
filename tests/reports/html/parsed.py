"""An HTML page: its tables, its pictures, and everything that a browser might ask for."""

import re
from typing import Any, NamedTuple

from bs4 import BeautifulSoup

REQUESTING = ("src", "href", "srcset", "poster", "data", "action", "formaction", "background", "ping", "xlink:href")


class ParsedCell(NamedTuple):
    text: str
    order: float | None  #: the number that it is sorted by


class ParsedTable:
    """Headings, rows, and the text above the table, which says once what all rows have."""

    def __init__(self, table: Any) -> None:
        self.headings = [heading.get_text() for heading in table("th")]
        rows = ([ParsedCell(cell.get_text(), _order(cell)) for cell in row("td")] for row in table("tr"))
        self.rows = [row for row in rows if row]
        self.common = "".join(each.get_text() for each in table.find_parent("details")("p", "common"))

    def records(self) -> list[dict[str, ParsedCell]]:
        """The cells of each row, by their headings."""
        return [dict(zip(self.headings, row, strict=True)) for row in self.rows]

    def column(self, heading: str) -> list[ParsedCell]:
        """The cells under a heading."""
        return [row[heading] for row in self.records()]


class Page:
    """A page.

    Attributes:
        tables: by id.
        links: (tag, attribute, value) of all that may be requested.
        styles, scripts: their texts.
        images: `src` of each.
        ids: of all elements.
    """

    def __init__(self, html: str) -> None:
        page: Any = BeautifulSoup(html, "html.parser")
        elements = page(True)
        self.tables = {table["id"]: ParsedTable(table) for table in page("table", "data")}
        self.links = [(tag.name, name, tag[name]) for tag in elements for name in REQUESTING if tag.has_attr(name)]
        self.styles = [*(each.get_text() for each in page("style")), *(tag["style"] for tag in page(style=True))]
        self.scripts = [each.get_text() for each in page("script")]
        self.images = [each.get("src", "") for each in page("img")]
        self.ids = [tag["id"] for tag in page(id=True)]
        self.tags = {tag.name for tag in elements}
        self.policy = "".join(each["content"] for each in page("meta", {"http-equiv": "Content-Security-Policy"}))

    def requests(self) -> list[str]:
        """What a browser would ask somebody for: all but data and places within the page."""
        asked = [value for _, _, value in self.links]
        asked += [match[1] for style in self.styles for match in re.finditer(r"url\(\s*[\"']?([^\"')]+)", style)]
        asked += [match[0] for style in self.styles for match in re.finditer(r"@import[^;]+", style)]
        asked += [
            match[1]
            for script in self.scripts
            for match in re.finditer(r"(?:from|import)\s*\(?\s*\"([^\"]+)\"", script)
        ]
        return [each[:100] for each in asked if not each.startswith(("#", "data:"))]


def _order(cell: Any) -> float | None:
    return float(cell["data-order"]) if cell.has_attr("data-order") else None
