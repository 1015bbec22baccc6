"""The pages and keys that each query row of a forward pass reads, by the metadata that its kernel is handed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lab.metadata import ForwardBatch, KVPool, TRTLLMMHAMetadata
from lab.metadata.mha.calls import plan_calls
from lab.references.forward_metadata import key_length, query_length
from lab.reports.pictures import style

LABEL_INCHES = 2.35
ROW_INCHES = 0.2
HEADING_INCHES = 0.95  # title, call and offsets
LEGEND_INCHES = 0.5
MOST_SLOTS = 40  # more are not legible side by side
FEWEST_SLOTS = 12  # fewer would be drawn too wide
LINES_BEFORE_ROWS = 4  # the two lengths, the pages, the tokens

# Blue and orange differ in lightness too; what is wrong is hatched besides.
CACHED, NEW, WRONG, EMPTY = "#56B4E9", "#E69F00", "#D55E00", "#FFFFFF"
CELLS: dict[str, dict[str, Any]] = {
    "cached": {"facecolor": CACHED, "edgecolor": "white"},
    "new": {"facecolor": NEW, "edgecolor": "white"},
    "empty": {"facecolor": EMPTY, "edgecolor": "#BBBBBB", "linestyle": ":"},
    "missed": {"facecolor": EMPTY, "edgecolor": WRONG, "hatch": "////"},
    "surplus": {"facecolor": WRONG, "edgecolor": "white", "hatch": "xxxx"},
}
LEGEND = {
    "cached": "token of an earlier pass",
    "new": "new: of this pass, or of this draft",
    "empty": "slot without a token",
    "missed": "key missed",
    "surplus": "key read that is not the row's",
}


@dataclass(frozen=True)
class RequestReads:
    """The keys that one request's query rows read by the metadata, and those that they must read.

    Attributes:
        engine_len: tokens, as the engine's `seq_lens` counts them.
        kernel_len: tokens, as the kernel is told.
        tokens: tokens whose K and V are in the pool when the kernel runs, this pass's included.
        new: how many of them are new: written by this pass, or by the steps of this draft.
        rows: of the query tensor, in the order of the request's newest tokens.
        pages: the live cells of the request's row of the page table.
    """

    engine_len: int
    kernel_len: int
    tokens: int
    new: int
    rows: range
    pages: tuple[int, ...]

    def read(self, row: int) -> range:
        """Return the positions that a row reads: a kernel puts the last row at the last key that it is told of."""
        return range(max(0, self.kernel_len - (self.rows.stop - 1 - row)))

    def wanted(self, row: int) -> range:
        """Return the positions that it must read: up to its own token."""
        return range(self.own_position(row) + 1)

    def own_position(self, row: int) -> int:
        """Return the position of the token that a row is the query of."""
        return self.tokens - (self.rows.stop - row)

    def kind(self, position: int) -> str:
        """Return "cached", "new" or "empty": the content of a position's slot."""
        if position >= self.tokens:
            return "empty"
        return "new" if position >= self.tokens - self.new else "cached"


def request_reads(batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata) -> list[RequestReads]:
    """Return what each request reads. The tokens are the batch's, not the metadata's, so that wrong metadata shows.

    Args:
        batch, pool: the forward pass, full attention.
        metadata: what its kernel is handed, right or wrong, eager or of a graph.
    """
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
    """Draw each request's pages and tokens, and beneath them, a line per query row, the keys that the row reads.

    Every cell of a query row is a `Rectangle` whose gid is "<kind> <query row> <position>"; kinds are those of `CELLS`.

    Args:
        batch, pool, metadata: as in `request_reads`; a page size and lengths that can be drawn, such as 4 and 10.
        title: the mode if None.

    Raises:
        ValueError: a request of more than `MOST_SLOTS` slots.
    """
    reads = request_reads(batch, pool, metadata)
    slots = _slots(reads, pool.page_size)
    num_lines = sum(LINES_BEFORE_ROWS + len(each.rows) + 1 for each in reads) or 2
    figure, axes = style.cell_axes(
        (0, slots),
        num_lines,
        line_inches=ROW_INCHES,
        label_inches=LABEL_INCHES,
        heading_inches=HEADING_INCHES,
        legend_inches=LEGEND_INCHES,
    )
    calls = " and ".join(each.call.value for each in plan_calls(batch)) or "no call"
    style.write_heading(
        figure,
        title or batch.forward_mode.name,
        f"{calls}: max_seq_len_q {metadata.max_seq_len_q}, pages of {pool.page_size} tokens",
        f"cu_seqlens_q {metadata.cu_seqlens_q.tolist()}, cu_seqlens_k {metadata.cu_seqlens_k.tolist()}",
    )
    line = 0
    for i, each in enumerate(reads):
        _draw_lengths(axes, line, i, each)
        _draw_pages(axes, line + 2, i, each, pool.page_size)
        _draw_tokens(axes, line + 3, each, len(_columns(each, pool.page_size)))
        for row in each.rows:
            _draw_row(axes, line + LINES_BEFORE_ROWS + row - each.rows.start, row, each)
        line += LINES_BEFORE_ROWS + len(each.rows) + 1
    if reads:
        style.legend_below(figure, _keys(reads), 3, columnspacing=1.5)
    else:
        axes.text(
            0, 1, "no request: no query row, no key, no kernel", fontsize=style.FONT_POINTS, color=style.TEXT_COLOUR
        )
    return figure


def _slots(reads: list[RequestReads], page_size: int) -> int:
    """Return the number of slots side by side."""
    most = max((len(_columns(each, page_size)) for each in reads), default=0)
    if most > MOST_SLOTS:
        raise ValueError(
            f"a request has {most} slots, more than {MOST_SLOTS}, which is as many as can be read side by side: "
            "draw shorter requests, on smaller pages"
        )
    return max(most, FEWEST_SLOTS)


def _columns(reads: RequestReads, page_size: int) -> range:
    """Return the positions that are drawn: whole pages of what there is, and of what is read."""
    return range(-(-max(reads.tokens, reads.kernel_len) // page_size) * page_size)


def _draw_lengths(axes: Axes, line: int, request: int, reads: RequestReads) -> None:
    """Draw two rulers: the tokens that the engine counts, and those that the kernel is told."""
    added = reads.kernel_len - reads.engine_len
    sum_of = f" = {reads.engine_len} {'+' if added > 0 else '−'} {abs(added)}" if added else ""
    style.group_label(axes, line, f"request {request}", LABEL_INCHES)
    style.row_label(axes, line, f"engine's seq_lens {reads.engine_len}")
    style.row_label(axes, line + 1, f"kernel's seq_lens {reads.kernel_len}{sum_of}")
    for place, length, colour in ((line, reads.engine_len, "#888888"), (line + 1, reads.kernel_len, "#000000")):
        axes.plot(
            [0, max(length, 0)], [place + 0.5] * 2, "|-", color=colour, linewidth=1.8, markersize=9, clip_on=False
        )


def _draw_pages(axes: Axes, line: int, request: int, reads: RequestReads, page_size: int) -> None:
    style.row_label(axes, line, f"block_tables[{request}]")
    for column, first in enumerate(_columns(reads, page_size)[::page_size]):
        live = column < len(reads.pages)
        look = {"facecolor": "#E8E8E8", "edgecolor": "#555555"} if live else CELLS["empty"]
        axes.add_patch(Rectangle((first + 0.04, line + 0.05), page_size - 0.08, 0.85, linewidth=0.8, **look))
        words = f"page {reads.pages[column]}" if live else "not in the table"
        style.write_in_cell(axes, first + page_size / 2, line, words)


def _draw_tokens(axes: Axes, line: int, reads: RequestReads, num_slots: int) -> None:
    style.row_label(axes, line, "token at position")
    for position in range(num_slots):
        _cell(axes, line, position, reads.kind(position))
        if position < reads.tokens:
            style.write_in_cell(axes, position + 0.5, line, str(position))


def _draw_row(axes: Axes, line: int, row: int, reads: RequestReads) -> None:
    style.row_label(axes, line, f"query row {row} reads")
    for position, kind in _row_cells(row, reads):
        _cell(axes, line, position, kind, gid=f"{kind} {row} {position}")
    if (own := reads.own_position(row)) >= 0:
        axes.plot(own + 0.5, line + 0.5, "o", color="black", markersize=4)


def _row_cells(row: int, reads: RequestReads) -> Iterator[tuple[int, str]]:
    """Yield position and kind of each key that the row reads or must read."""
    read, wanted = reads.read(row), reads.wanted(row)
    for position in range(max(len(read), len(wanted))):
        if position not in read:
            yield position, "missed"
        elif position not in wanted:
            yield position, "surplus"
        else:
            yield position, reads.kind(position)


def _cell(axes: Axes, line: int, position: int, kind: str, gid: str | None = None) -> None:
    axes.add_patch(Rectangle((position, line), 1, 1, linewidth=0.8, gid=gid, **CELLS[kind]))


def _keys(reads: list[RequestReads]) -> list[Artist]:
    """Return the legend's keys; errors are explained where there are any."""
    wrong = {kind for each in reads for row in each.rows for _, kind in _row_cells(row, each)}
    shown = [kind for kind in CELLS if kind in ("cached", "new", "empty") or kind in wrong]
    keys: list[Artist] = [Patch(linewidth=0.8, label=LEGEND[kind], **CELLS[kind]) for kind in shown]
    return [*keys, style.mark_key("the row's own token", "o", color="black", markersize=4)]
