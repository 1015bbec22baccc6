"""Draw the pages and keys that each query row of a forward pass reads by its metadata, and a recorded call's page tables."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from lab.metadata import ForwardBatch, KVPool, TRTLLMMHAMetadata
from lab.metadata.mha.backend import plan_calls
from lab.references.forward_metadata import key_length, query_length
from studies.pictures.cells import Box, Line, Look, Ruler, cells_figure, check_legible

MOST_SLOTS = 40  # more are not legible side by side
FEWEST_SLOTS = 12  # fewer would be drawn too wide

# Blue and orange differ in lightness too; what is wrong is hatched besides.
KINDS = {
    "cached": Look("#56B4E9", "token of an earlier pass"),
    "new": Look("#E69F00", "new: of this pass, or of this draft"),
    "empty": Look("white", "slot without a token", edge="#BBBBBB", linestyle=":"),
    "missed": Look("white", "key missed", edge="#D55E00", hatch="////"),
    "surplus": Look("#D55E00", "key read that is not the row's", hatch="xxxx"),
    "page": Look("#E8E8E8", edge="#555555"),
}


@dataclass(frozen=True)
class RequestReads:
    """The keys that the query rows of one request read according to the metadata, and the keys that they must read.

    Attributes:
        tokens: tokens with K and V in the pool when the kernel runs, including the new ones.
        new: number of tokens that this pass, or the steps of this draft, have written.
        rows: indices of the request's rows in the query tensor, in the order of its newest tokens.
        pages: the live cells of the request's row of the page table.
    """

    engine_len: int
    kernel_len: int
    tokens: int
    new: int
    rows: range
    pages: tuple[int, ...]

    def read(self, row: int) -> range:
        """Return the positions that a row reads: the last row reads up to the last key by the kernel's length."""
        return range(max(0, self.kernel_len - (self.rows.stop - 1 - row)))

    def wanted(self, row: int) -> range:
        return range(self.own_position(row) + 1)

    def own_position(self, row: int) -> int:
        return self.tokens - (self.rows.stop - row)

    def kind(self, position: int) -> str:
        if position >= self.tokens:
            return "empty"
        return "new" if position >= self.tokens - self.new else "cached"


def request_reads(batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata) -> list[RequestReads]:
    """Return what each request of a full-attention pass reads. Tokens are taken from the batch, not from the metadata."""
    offsets, kernel_lens = metadata.cu_seqlens_q.tolist(), metadata.cache_seqlens_int32.tolist()
    reads = []
    for i, engine_len in enumerate(batch.seq_lens.tolist()):
        tokens = key_length(batch, i)
        num_pages = max(0, -(-kernel_lens[i] // pool.page_size))
        reads.append(
            RequestReads(
                engine_len=engine_len,
                kernel_len=kernel_lens[i],
                tokens=tokens,
                new=max(query_length(batch, i), tokens - engine_len),
                rows=range(offsets[i], offsets[i + 1]),
                pages=tuple(metadata.page_table[i, :num_pages].tolist()),
            )
        )
    return reads


def reading_figure(batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata, title: str | None = None) -> Figure:
    """Draw the pages and tokens of each request, and below them a line per query row with the keys that it reads.

    A cell of a query row has the gid "<kind> <query row> <position>", where kind is a key of `KINDS`. Without `title`, the
    title is the forward mode.
    """
    reads = request_reads(batch, pool, metadata)
    slots = max((len(_columns(each, pool.page_size)) for each in reads), default=0)
    check_legible(slots, "slots", MOST_SLOTS, "draw shorter requests, on smaller pages")
    lines = [line for i, each in enumerate(reads) for line in _lines(i, each, pool.page_size)]
    calls = " and ".join(each.call.value for each in plan_calls(batch)) or "no call"
    return cells_figure(
        title or batch.forward_mode.name,
        lines or [Line(heading="no request: no query row, no key, no kernel")],
        KINDS,
        (0, max(slots, FEWEST_SLOTS)),
        subtitle=f"{calls}: max_seq_len_q {metadata.max_seq_len_q}, pages of {pool.page_size} tokens\n"
        f"cu_seqlens_q {metadata.cu_seqlens_q.tolist()}, cu_seqlens_k {metadata.cu_seqlens_k.tolist()}",
        dot="the row's own token",
    )


def _columns(reads: RequestReads, page_size: int) -> range:
    """Return the positions that are drawn: all positions of the pages that hold the tokens and the keys that are read."""
    return range(-(-max(reads.tokens, reads.kernel_len) // page_size) * page_size)


def _lines(request: int, reads: RequestReads, page_size: int) -> Iterator[Line]:
    added = reads.kernel_len - reads.engine_len
    sum_of = f" = {reads.engine_len} {'+' if added > 0 else '−'} {abs(added)}" if added else ""
    yield Line(heading=f"request {request}")
    yield Line(f"engine's seq_lens {reads.engine_len}", rulers=[Ruler(0, reads.engine_len, colour="#888888")])
    yield Line(f"kernel's seq_lens {reads.kernel_len}{sum_of}", rulers=[Ruler(0, max(reads.kernel_len, 0))])
    positions = _columns(reads, page_size)
    pages = [("page", f"page {page}") for page in reads.pages]
    pages += [("empty", "not in the table")] * (len(positions) // page_size - len(pages))
    starts = positions[::page_size]
    yield Line(
        f"block_tables[{request}]",
        [Box(x, kind, words, page_size) for x, (kind, words) in zip(starts, pages, strict=True)],
    )
    yield Line("token at position", [Box(x, reads.kind(x), str(x) if x < reads.tokens else "") for x in positions])
    for row in reads.rows:
        cells = [Box(x, kind, gid=f"{kind} {row} {x}") for x, kind in _row_cells(row, reads)]
        own = reads.own_position(row)
        yield Line(f"query row {row} reads", cells, dot=own + 0.5 if own >= 0 else None)


def _row_cells(row: int, reads: RequestReads) -> Iterator[tuple[int, str]]:
    read, wanted = reads.read(row), reads.wanted(row)
    for position in range(max(len(read), len(wanted))):
        if position not in read:
            yield position, "missed"
        elif position not in wanted:
            yield position, "surplus"
        else:
            yield position, reads.kind(position)


MOST_COLUMNS = 24
PAGE_KINDS = {
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
    return cells_figure(
        title, lines, PAGE_KINDS, (0, tables.shape[1]), subtitle="column of the page table", across=across
    )
