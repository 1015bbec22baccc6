"""Words that several parts of the lab share: numbers with their nouns, and texts of others that are safe to print."""

import re
from collections.abc import Sequence

# Control characters but line feed and tab, and halves of surrogate pairs, which no encoding takes.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 request" or "8,000 requests"."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def joined(words: Sequence[str]) -> str:
    """Return words in an enumeration, such as "A, B and C"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def first_few(sentences: Sequence[str], most: int) -> list[str]:
    """Return the first sentences, and how many more there are."""
    more = len(sentences) - most
    return [*sentences[:most], *([f"and {more} more"] if more > 0 else [])]


def shortened(text: str, most_characters: int) -> str:
    """Return a text that is at most so long. A longer one ends with "…"."""
    return text if len(text) <= most_characters else f"{text[: most_characters - 1]}…"


def printable(text: str) -> str:
    """Return a text with control characters as escapes, such as "\\x1b". A terminal would execute them."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def in_markdown(text: str) -> str:
    """Return a printable text in one line, in which "<" begins no HTML."""
    return printable(text).replace("\n", " ").replace("<", "&lt;")
