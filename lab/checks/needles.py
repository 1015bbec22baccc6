"""Where an error of one shows among the keys of a request."""

TILE_SIZES = (64, 128)  # keys that kernels take at a time


def needle_positions(kv_len: int, q_len: int, page_size: int, window_left: int = -1) -> list[int]:
    """The ends of what each row sees, the edges of pages and tiles there, and their neighbours.

    Args:
        kv_len, q_len: keys and query rows of the request; the rows are its newest tokens'.
        page_size: tokens per page.
        window_left: keys to the left of a row that it sees; -1 for all.
    """
    edges = {0, kv_len - 1}
    for position in {kv_len - q_len, kv_len - q_len // 2 - 1, kv_len - 1}:
        edges |= {position, *(position // size * size for size in (page_size, *TILE_SIZES))}
        if window_left >= 0:
            edges |= {position - window_left}
    return sorted({near for edge in edges for near in (edge - 1, edge, edge + 1) if 0 <= near < kv_len})
