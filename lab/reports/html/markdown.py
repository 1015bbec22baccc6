"""The folder's Markdown files as parts of the page: without raw HTML, and without links and pictures, which leave the page."""

import re
from itertools import zip_longest
from pathlib import Path

from markdown_it import MarkdownIt

from lab.reports.html.findings import Finding, slug

SECTION_HEADING = re.compile(r"^## +(.+)$", re.MULTILINE)


def markdown_html(text: str) -> str:
    """Return Markdown as HTML. Its headings are two levels lower, since the page has h1 and h2 of its own."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    for rule in ("link_open", "link_close"):
        markdown.add_render_rule(rule, lambda *_: "")
    tokens = markdown.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1:]) + 2, 6)}"
    return str(markdown.renderer.render(tokens, markdown.options, {}))


def finding_html(finding: Finding, folder: Path) -> str:
    """Return the section that describes a finding, as HTML without links; "" if the folder does not have it.

    Args:
        finding: cites the page and the section.
        folder: searched for a file with the name of the page; the folders of the citation's path are ignored.
    """
    page = folder / Path(finding.path).name
    if not page.is_file():
        return ""
    text = page.read_text(encoding="utf-8")
    headings = list(SECTION_HEADING.finditer(text))
    for heading, following in zip_longest(headings, headings[1:]):
        if slug(heading[1]) == finding.heading:
            return markdown_html(text[heading.start() : following.start() if following else None])
    return ""
