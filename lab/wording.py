"""Words that several parts of the lab share: numbers with their nouns."""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 request" or "8,000 requests"."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"
