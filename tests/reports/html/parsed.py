"""An HTML page read with the standard library: its tables, its pictures, and everything that a browser might ask for."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

REQUESTING = ("src", "href", "srcset", "poster", "data", "action", "formaction", "background", "ping", "xlink:href")


@dataclass
class ParsedCell:
    """Text of a cell, and the number that it is sorted by."""

    text: str = ""
    order: float | None = None


@dataclass
class ParsedTable:
    """Headings and rows."""

    headings: list[str] = field(default_factory=list)
    rows: list[list[ParsedCell]] = field(default_factory=list)

    def records(self) -> list[dict[str, ParsedCell]]:
        """The cells of each row, by their headings."""
        return [dict(zip(self.headings, row, strict=True)) for row in self.rows]

    def column(self, heading: str) -> list[ParsedCell]:
        """The cells under a heading."""
        return [row[heading] for row in self.records()]


class Page(HTMLParser):
    """A page.

    Attributes:
        tables: by id.
        common: by id, what is said once of all rows, {heading: text}.
        links: (tag, attribute, value) of all that may be requested.
        styles, scripts: their texts.
        images: `src` of each.
        ids: of all elements.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, ParsedTable] = {}
        self.common: dict[str, str] = {}
        self.links: list[tuple[str, str, str]] = []
        self.styles: list[str] = []
        self.scripts: list[str] = []
        self.images: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.policy = ""
        self._table: ParsedTable | None = None
        self._within: str = ""
        self._said: str = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.tags.append(tag)
        self.links += [(tag, name, value) for name, value in given.items() if name in REQUESTING]
        if "style" in given:
            self.styles.append(given["style"])
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "img":
            self.images.append(given.get("src", ""))
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if tag == "summary":
            self._said = ""
        if tag == "p" and given.get("class") == "common":
            self._within = "common"
        if tag == "table" and "data" in given.get("class", "").split():
            self._table = self.tables[given["id"]] = ParsedTable()
            self.common[given["id"]] = self._said
        if self._table is not None:
            if tag == "th":
                self._table.headings.append("")
            elif tag == "tr":
                self._table.rows.append([])
            elif tag == "td":
                order = given.get("data-order")
                self._table.rows[-1].append(ParsedCell(order=None if order is None else float(order)))
        if tag in ("style", "script", "td", "th"):
            self._within = tag
            if tag in ("style", "script"):
                {"style": self.styles, "script": self.scripts}[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table" and self._table is not None:
            self._table.rows = [row for row in self._table.rows if row]
            self._table = None
        if tag in ("style", "script", "td", "th", "p"):
            self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within == "style":
            self.styles[-1] += data
        elif self._within == "script":
            self.scripts[-1] += data
        elif self._within == "common":
            self._said += data
        elif self._within == "th" and self._table is not None:
            self._table.headings[-1] += data
        elif self._within == "td" and self._table is not None:
            self._table.rows[-1][-1].text += data

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
