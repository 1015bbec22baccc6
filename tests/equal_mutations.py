"""Mutations that change nothing that a test could see: (file, line before, line after) and the reason."""

EQUAL: dict[tuple[str, str, str], str] = {}
