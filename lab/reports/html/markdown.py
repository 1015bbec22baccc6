"""The folder's own texts as parts of the page: Markdown without raw HTML, and without links or pictures out of the page."""

import re
from pathlib import Path

from markdown_it import MarkdownIt

from lab.reports.html.findings import Finding

HEADING = re.compile(r"^## +(.+)$", re.MULTILINE)


def markdown_html(text: str) -> str:
    """Return a text as HTML, its headings two levels lower, as parts of a section."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    for rule in ("link_open", "link_close"):
        markdown.add_render_rule(rule, lambda *_: "")
    tokens = markdown.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1:]) + 2, 6)}"
    return str(markdown.renderer.render(tokens, markdown.options, {}))


def finding_html(finding: Finding, folder: Path) -> str:
    """Return the finding's section of its page, as HTML without links; "" if the folder does not have it.

    Args:
        folder: where the page lies, by the name that the citation's path ends with.
    """
    page = folder / Path(finding.path).name
    if not page.is_file():
        return ""
    text = page.read_text(encoding="utf-8")
    headings = list(HEADING.finditer(text))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        if slug(heading[1]) == finding.heading:
            return markdown_html(text[heading.start() : following.start() if following else None])
    return ""


def slug(heading: str) -> str:
    """Return the anchor that a code host gives a heading: lower case, words joined by hyphens, other signs dropped."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
