"""Convert Markdown to HTML for the page, and find the sections of Markdown pages (findings) that reports of the judge cite."""

import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
SECTION_HEADING = re.compile(r"^## +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """A section of a Markdown page about a known failure of a kernel. Reports of the judge cite it as "path#heading"."""

    path: str  #: path of the Markdown page, relative to the root of the repository
    heading: str  #: anchor of the section (`slug`), such as "2-fmha_v2-with-bf16-ignores-bmm2_scale"

    @property
    def target(self) -> str:
        return f"finding-{self.heading}"

    @property
    def label(self) -> str:
        number, _, _ = self.heading.partition("-")
        return number if number.isdigit() else self.heading

    @property
    def order(self) -> tuple[int, str]:
        return (int(self.label) if self.label.isdigit() else 0, self.heading)

    def html(self, folder: Path) -> str:
        """Return the section as HTML; "" if `folder` has no such page, or the page has no such section."""
        page = folder / Path(self.path).name
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        headings = list(SECTION_HEADING.finditer(text))
        for heading, following in zip_longest(headings, headings[1:]):
            if slug(heading[1]) == self.heading:
                return markdown_html(text[heading.start() : following.start() if following else None])
        return ""


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def findings_in(citation: str) -> tuple[Finding, ...]:
    return tuple(Finding(*each.split("#", 1)) for each in citation.split("; ") if "#" in each)


def markdown_html(text: str) -> str:
    """Convert Markdown to HTML without comments and pictures. Links keep only their text, and raw HTML is shown as text."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    for rule in ("link_open", "link_close", "image"):
        markdown.add_render_rule(rule, lambda *_: "")
    tokens = markdown.parse(COMMENT.sub("", text))
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1:]) + 2, 6)}"
    return str(markdown.renderer.render(tokens, markdown.options, {}))
