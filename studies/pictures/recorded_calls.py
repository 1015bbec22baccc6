"""Draw a recorded call's page tables: the pages of each request, and which of them several requests share."""

from collections import Counter

import torch
from matplotlib.figure import Figure

from studies.pictures.cells import Box, Line, Look, cells_figure, check_legible

MOST_COLUMNS = 24
LOOKS = {
    "own": Look("#D1E5F0", "a full page of one request"),
    "shared": Look("#E69F00", "a page of several requests"),
    "last": Look("#FFFFFF", "a last page with room for more keys", edge="#2166AC"),
    "dead": Look("#F2F2F2", "a cell that no row reads"),
}


def pages_figure(tables: torch.Tensor, kv_lens: torch.Tensor, page_size: int, title: str) -> Figure:
    """Draw a line per request: its number of keys, and the page ids in its row of the table, [num_requests, num_columns]."""
    check_legible(tables.shape[1], "pages", MOST_COLUMNS, "draw the first columns alone")
    rows, lengths = tables.tolist(), kv_lens.tolist()
    live = [row[: -(-length // page_size)] for row, length in zip(rows, lengths, strict=True)]
    owners = Counter(page for pages in live for page in set(pages))
    lines = []
    for request, (row, pages, length) in enumerate(zip(rows, live, lengths, strict=True)):
        kinds = ["shared" if owners[page] > 1 else "own" for page in pages]
        if length % page_size and kinds[-1] == "own":
            kinds[-1] = "last"
        kinds += ["dead"] * (len(row) - len(pages))
        cells = [Box(x, kind, str(page)) for x, (kind, page) in enumerate(zip(kinds, row, strict=True))]
        lines.append(Line(f"request {request}: {length:,} keys", cells))
    across = {x + 0.5: str(x) for x in range(tables.shape[1])}
    return cells_figure(title, lines, LOOKS, (0, tables.shape[1]), subtitle="column of the page table", across=across)
