"""Format numbers, lists and texts of other programs for messages and reports."""

import re
from collections.abc import Sequence

# Control characters except line feed and tab, and halves of surrogate pairs, which cannot be encoded.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 request" or "8,000 requests"."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def joined(words: Sequence[str]) -> str:
    """Join words to an enumeration such as "A, B and C"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def first_few(sentences: Sequence[str], most: int) -> list[str]:
    """Return the first `most` sentences. If there are more, append a text such as "and 3 more"."""
    more = len(sentences) - most
    return [*sentences[:most], *([f"and {more} more"] if more > 0 else [])]


def shortened(text: str, most_characters: int) -> str:
    """Return a text of at most `most_characters` characters. A cut text ends with "…"."""
    return text if len(text) <= most_characters else f"{text[: most_characters - 1]}…"


def printable(text: str) -> str:
    """Replace control characters in a text by escapes such as "\\x1b", because a terminal would execute them."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def in_markdown(text: str) -> str:
    """Convert a text to one line of Markdown: escape control characters (`printable`) and "<"."""
    return printable(text).replace("\n", " ").replace("<", "&lt;")


def slug(heading: str) -> str:
    """Return the anchor of a Markdown heading, such as "1-not-finite" for "1. Not finite"."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
