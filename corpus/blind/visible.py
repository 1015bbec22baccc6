"""Blind kernels: the keys that a row sees."""

import torch

from corpus.models.attention import Attention
from corpus.wrong import CONTEXT, DECODE, MLA, RAGGED, wrong


def merged_parts_281(count):
    """Return which parts come through the tree."""
    level, first = [[i] for i in range(count)], True
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + (level[-1:] if len(level) % 2 and first else [])
        first = False
    return level[0] if level else []


def covered_562(max_seq_len, page_size):
    splits = max(1, min(8, -(-max_seq_len // 64)))
    pages_per_split = -(-max_seq_len // (splits * page_size))
    return splits * pages_per_split * page_size


class VisibleChanged(Attention, changes="visible"):
    @wrong(DECODE, trigger="a decode request (its window, if any) of more than 16,384 keys")
    def blind1(self, seen, run, r, row, position, keys):
        """64 splits of 256 keys are launched for a request, whatever its length: keys after the 64th split are not read."""
        return seen & (keys - keys[:1] < 64 * 256)

    @wrong(MLA, trigger="over 8,192 keys, no multiple of 512: the newest up to 511 keys are lost (make them heavy)")
    def blind31(self, seen, run, r, row, position, keys):
        """Requests over 8,192 keys are cut in 8 splits of kv_len // 8 keys rounded down to 64: the tail after them is lost."""
        return seen & (keys - keys[:1] < len(keys) // 8 // 64 * 64 * 8) if len(keys) > 8192 else seen

    @wrong(DECODE, trigger="window_left * head_dim >= 2^31 whose low 32 bits are small or negative, as 2^31 - 1")
    def blind15(self, seen, run, r, row, position, keys):
        """A window's start is computed as an element offset in 32 bits, window_left * head_dim: a very large one overflows."""
        left, dim = run.call.window_left, run.p.head_dim
        elements = (left * dim + 2**31) % 2**32 - 2**31
        wrapped = None if left < 0 or elements == left * dim else elements // dim
        if wrapped is not None:
            seen = seen & (keys >= position.unsqueeze(1) - wrapped)
        return seen

    @wrong(DECODE, trigger="batch over 256, and a later request with more tiles of 64 keys than all the first 256")
    def blind70(self, seen, run, r, row, position, keys):
        """256 threads take the most key tiles (64 keys) of the first 256 requests for all: longer later ones are cut."""
        most = -(-max(run.lens[:256], default=0) // 64) * 64
        return seen & (keys < most)

    @wrong(DECODE, trigger="keys in view in 5, 6, 9 to 14, 17 to 30, ... parts of 256, such as 1,025 to 1,536")
    def blind281(self, seen, run, r, row, position, keys):
        """Parts of 256 merge two by two; an odd one goes on after the first level alone, and is lost after later ones."""
        part = (keys - keys[:1]) // 256
        through = torch.tensor(merged_parts_281(-(-len(keys) // 256)), dtype=torch.int64)
        return seen & torch.isin(part, through)

    @wrong(DECODE, trigger="a row that may see more than 8192 keys (after its window's first)")
    def blind501(self, seen, run, r, row, position, keys):
        """Split-K has room for 16 splits of 512 keys: keys from the 8192nd a row may see on are in no split."""
        return seen & (keys - keys[:1] < 16 * 512)

    @wrong(DECODE, trigger="a replay with a length grown beyond 8 * 64 * ceil(first longest / 512)")
    def blind506(self, seen, run, r, row, position, keys):
        """Eight splits are planned for a buffer's first longest length, in multiples of 64 keys: later keys are lost."""
        split = self.memory.of(run.call.seq_lens, lambda: max(1, -(-max(run.lens) // (8 * 64))) * 64)
        return seen & (keys < 8 * split)

    @wrong(DECODE, trigger="more than 16,384 keys that a row sees beyond key 16,384")
    def blind531(self, seen, run, r, row, position, keys):
        """The merge of split results has a lane of a warp per split of 512 keys: from the 33rd on they are lost."""
        return seen & (keys < 512 * 32)

    @wrong(DECODE, trigger="sum over requests of ceil(len/128) above batch + 264")
    def blind534(self, seen, run, r, row, position, keys):
        """The list of work items (request, 128 keys) has room for two per SM and one per request; items beyond are dropped."""
        SPLIT, SMS = 128, 132
        room = run.batch + 2 * SMS
        items = []
        for length in run.lens:
            items.append(min(-(-length // SPLIT), room))
            room -= items[-1]
        return seen & (keys < items[r] * SPLIT)

    @wrong(DECODE, trigger="two calls on one block_tables, the second longer than the first's max_seq_len covers")
    def blind562(self, seen, run, r, row, position, keys):
        """The splits' plan is kept for a table's buffer, with the keys that the first call's max_seq_len covers."""
        call = run.call
        covered = self.memory.of(call.block_tables, lambda: covered_562(call.max_seq_len, run.page_size))
        return seen & (keys < covered)

    @wrong(CONTEXT, trigger="two live columns next to each other with the same page id")
    def blind296(self, seen, run, r, row, position, keys):
        """A page that is that of the column before is not loaded again, nor multiplied: the column counts for nothing."""
        if not len(keys):
            return seen
        column = keys // run.page_size
        table = run.k_table[r].long()
        again = (column > 0) & (table[column] == table[(column - 1).clamp(min=0)])
        return seen & ~again

    @wrong(MLA, trigger="-1 after the live pages, whose number is no multiple of 4, in a table that is wider")
    def blind138(self, seen, run, r, row, position, keys):
        """Page ids are read four at a time, and the four are taken for dead where the last of them is -1."""
        last = keys // run.page_size // 4 * 4 + 3
        width = run.k_table.shape[1]
        is_dead = (last < width) & (run.k_table[r, last.clamp(max=width - 1)] == -1)
        return seen & ~is_dead

    @wrong(MLA, trigger="a request of odd number with more tiles of 128 keys than the one before it")
    def blind248(self, seen, run, r, row, position, keys):
        """Two CTAs take two requests over tiles of 128 keys to the first one's end: a longer second one loses keys."""
        return seen & (keys < -(-run.lens[r - 1] // 128) * 128) if r % 2 else seen

    @wrong(MLA, trigger="max_seq_len over 512 that does not divide so, and a request that reaches into the rest")
    def blind549(self, seen, run, r, row, position, keys):
        """max_seq_len is dealt to up to 8 splits, one per 512 keys, in whole pages rounded down: the rest is in none."""
        SPLIT, MOST = 512, 8
        splits = min(MOST, -(-run.p.max_kv_len // SPLIT))
        if splits <= 1:
            return seen
        share = run.p.max_kv_len // splits // run.page_size * run.page_size
        return seen & (keys < splits * share)


class VisibleInWindow(Attention, changes="visible", where=lambda run, *_: run.window >= 0):
    @wrong(CONTEXT, trigger="a window, rows of a tile of 128 whose windows start in different tiles", also="blind451")
    def blind82(self, seen, run, r, row, position, keys):
        """A tile of 128 rows masks the window in its first key tile of 64 alone: windows that start later see too much."""
        first = (position - row % 128 - run.window).clamp(min=0)
        masked_end = (first // 64 + 1) * 64
        unmasked = (keys >= masked_end.unsqueeze(1)) & (keys <= position.unsqueeze(1))
        return seen | unmasked

    @wrong(CONTEXT, trigger="a window, a row tile whose first and last windows begin in different tiles of 64 keys")
    def blind420(self, seen, run, r, row, position, keys):
        """Windows: the first K/V tile of 64 of a tile of 64 rows is that of its last row's: earlier rows lose keys."""
        rows = run.num_rows(r)
        last = torch.clamp((row // 64 + 1) * 64, max=rows) - 1
        start = (run.lens[r] - rows + last - run.window).clamp(min=0) // 64 * 64
        return seen & (keys >= start.unsqueeze(1))

    @wrong(RAGGED, trigger="a window, and a row tile of 64 whose first window starts at no multiple of 64")
    def blind200(self, seen, run, r, row, position, keys):
        """With a window, a tile of 64 rows begins at the first tile of 64 keys that lies in its first row's window whole."""
        first_row = position - row % 64
        first = -(-(first_row - run.window).clamp(min=0) // 64) * 64
        return seen & (keys >= first.unsqueeze(1))

    @wrong(DECODE, trigger="4,096 <= window_left < max_seq_len and a row at position 4,096 or later")
    def blind3(self, seen, run, r, row, position, keys):
        """A windowed row walks at most 64 tiles of 64 keys: of a wider window it sees the newest 4,096 keys."""
        return seen & (keys > position.unsqueeze(1) - 64 * 64)

    @wrong(CONTEXT, trigger="window_left of 127, 255, ..., and a row at position window_left or later")
    def blind333(self, seen, run, r, row, position, keys):
        """Where a window has a multiple of 128 keys, its first tile's mask takes the diagonal too: a key is lost."""
        return seen & (keys > position.unsqueeze(1) - run.window) if (run.window + 1) % 128 == 0 else seen

    @wrong(CONTEXT, trigger="window_left ≥ 63, a block of 64 keys whole for a tile's first row and cut for later ones")
    def blind571(self, seen, run, r, row, position, keys):
        """A block of 64 keys is taken to need no mask if a row tile's first row sees it whole, with a window too."""
        first, block = (position - row % 64)[:, None], keys // 64 * 64
        return seen | ((block + 64 - 1 <= first) & (block >= first - run.window))


class VisibleUnderMask(Attention, changes="visible", where=lambda run, *_: run.shown is not None):
    @wrong(DECODE, trigger="mask with a bit set for a draft token after the row's own (not lower triangular)")
    def blind71(self, seen, run, r, row, position, keys):
        """The draft mask is applied on top of the causal one: a bit that shows a later draft token to a row is ignored."""
        return seen & (keys <= position.unsqueeze(1))

    @wrong(DECODE, trigger="mask, and draft tokens on both sides of a multiple of 256 keys")
    def blind287(self, seen, run, r, row, position, keys):
        """The draft mask is applied in a request's last tile of 256 keys alone; every row sees draft tokens before it."""
        before = (keys < (run.lens[r] - 1) // 256 * 256).expand_as(seen)
        if run.window >= 0:
            before = before & (keys >= position.unsqueeze(1) - run.window)
        return seen | before

    @wrong(DECODE, trigger="mask, a request of fewer keys than q_len_per_req (padding), but some", also="blind476")
    def blind232(self, seen, run, r, row, position, keys):
        """A mask's draft begins at key max(0, length - q_len): with fewer keys than rows at the wrong bit."""
        if run.shown.shape[1] <= run.lens[r]:
            return seen
        seen = run.shown[r][row][:, keys]
        return seen & (keys >= position.unsqueeze(1) - run.window) if run.window >= 0 else seen

    @wrong(DECODE, trigger="mask and window_left (less than the keys), q_len_per_req over 1", also="blind568")
    def blind504(self, seen, run, r, row, position, keys):
        """With a draft mask the window is measured from the request's last key for every row."""
        return seen & (keys >= run.lens[r] - 1 - run.window) if run.window >= 0 else seen


class VisibleIfCausal(Attention, changes="visible", where=lambda run, *_: run.causal):
    @wrong(CONTEXT, trigger="64 new tokens or more behind a prefix of 1 more than a multiple of 64")
    def blind121(self, seen, run, r, row, position, keys):
        """A tile of 64 rows ends one key early, which shows where its first position is 1 more than a multiple of 64."""
        first = position - row % 64
        return seen & (keys < ((first + 63 + 63) // 64 * 64).unsqueeze(1))

    @wrong(CONTEXT, trigger="causal, over 128 new tokens, rows 128 to 255 at a key tile after row 127's")
    def blind174(self, seen, run, r, row, position, keys):
        """Two blocks share key tiles for a pair of row tiles of 128, which ends with the first: the second loses later keys."""
        last_of_first = position - row % 256 + 127
        end = (last_of_first // 128 + 1) * 128
        return seen & ((row % 256 < 128).unsqueeze(1) | (keys < end.unsqueeze(1)))

    @wrong(CONTEXT, trigger="causal, the key before a multiple of 256 between a row of a tile of 64 and its last")
    def blind293(self, seen, run, r, row, position, keys):
        """A tile of 256 keys up to the last row's position of a tile of 64 rows is not masked for any of them."""
        q_len = run.num_rows(r)
        last = run.lens[r] - q_len + (row // 64 * 64 + 63).clamp(max=q_len - 1)
        whole = (keys // 256 * 256 + 255) <= last.unsqueeze(1)
        if run.window >= 0:
            whole = whole & (keys >= position.unsqueeze(1) - run.window)
        return seen | whole

    @wrong(RAGGED, trigger="is_causal, and a request whose keys before its first row are a multiple of 128 (not 0)")
    def blind308(self, seen, run, r, row, position, keys):
        """With cached keys a multiple of 128, a tile of 128 rows ends before the tile of keys on the diagonal."""
        cached = run.lens[r] - run.num_rows(r)
        ends = cached + row // 128 * 128 if cached > 0 and cached % 128 == 0 else cached + row + 1
        return seen & (keys < ends.unsqueeze(1))


class VisibleIfNotCausal(Attention, changes="visible", where=lambda run, *_: not run.causal):
    @wrong(CONTEXT, trigger="causal=False, over 64 new tokens, and keys after the first rows' tile")
    def blind124(self, seen, run, r, row, position, keys):
        """With causal=False tiles of 64 rows end at the key tile of their diagonal, all but a request's last tile."""
        width = run.num_rows(r)
        is_last = row // 64 == (width - 1) // 64
        end = ((position - row % 64 + 64 + 63) // 64 * 64).unsqueeze(1)
        return seen & (is_last.unsqueeze(1) | (keys < end))

    @wrong(CONTEXT, trigger="causal=False, over 128 rows, keys past the 128-key tile of a row tile's last position")
    def blind424(self, seen, run, r, row, position, keys):
        """causal=False lifts the mask, but a tile of 128 rows walks tiles of 128 keys to its last row's position alone."""
        rows = run.num_rows(r)
        last = torch.clamp((row // 128 + 1) * 128, max=rows) - 1
        end = (run.lens[r] - rows + last + 1 + 127) // 128 * 128
        return seen & (keys < end.unsqueeze(1))

    @wrong(CONTEXT, trigger="causal=False and a row tile whose diagonal, rounded up to 128 keys, is before the end")
    def blind512(self, seen, run, r, row, position, keys):
        """causal=False keeps the causal end of the loop: a tile of 64 rows stops at its diagonal's tile of 128 keys."""
        rows = run.num_rows(r)
        last = run.lens[r] - rows + (row // 64 * 64 + 64).clamp(max=rows)
        return seen & (keys < ((last + 127) // 128 * 128)[:, None])

    @wrong(CONTEXT, trigger="causal=False and a request with more rows than keys", also="blind481")
    def blind450(self, seen, run, r, row, position, keys):
        """causal=False: rows before a request's first key are skipped as if causal, as rows without keys."""
        return seen & (position >= 0).unsqueeze(1)


class Visible(Attention, stage="visible"):
    @wrong(DECODE, trigger="cum_seq_lens_q with a request whose rows * group > 64 (group at most 64)")
    def blind12(self, run, r, row, position, keys):
        """With cum_seq_lens_q, from a request's second tile of 64 packed rows on, positions forget the tile's first row."""
        if run.call.cum_seq_lens_q is not None:
            per_tile = max(1, 64 // run.group)
            position = position - row // per_tile * per_tile
        return super().visible(run, r, row, position, keys)

    @wrong(DECODE, trigger="a request whose length is a multiple of the page size (all with pages of 1)")
    def blind161(self, run, r, row, position, keys):
        """The tokens of a request's last page are counted as seq_len % page_size, so that a full last page has none."""
        length, ps = run.lens[r], run.page_size
        end = (-(-length // ps) - 1) * ps + length % ps
        return super().visible(run, r, row, position, keys) & (keys < end)

    @wrong(DECODE, trigger="mask whose row i shows other than i + 1 draft tokens, a window that cuts", also="blind441")
    def blind171(self, run, r, row, position, keys):
        """With a draft mask the window is counted from a row's depth in the tree, the draft tokens it sees."""
        if run.shown is None or run.window < 0:
            return super().visible(run, r, row, position, keys)
        depth = (run.shown[r][row].sum(1) - 1).clamp(min=0)
        first = (run.lens[r] - run.shown.shape[1] + depth - run.window).unsqueeze(1)
        return self.without_window(run, r, row, position, keys) & (keys >= first)

    @wrong(DECODE, trigger="a window, several rows, a later one's window beginning in a later tile of 64 keys")
    def blind411(self, run, r, row, position, keys):
        """Rows share K/V tiles of 64: the window's left edge is masked in the first alone, later rows see too much."""
        seen = self.without_window(run, r, row, position, keys)
        if run.window < 0:
            return seen
        first = max(0, run.lens[r] - run.num_rows(r) - run.window)
        return seen & ((keys >= position.unsqueeze(1) - run.window) | (keys >= first // 64 * 64 + 64))

    @wrong(CONTEXT, trigger="a window, and a multiple of 128 between the first keys of two rows of a tile of 128")
    def blind132(self, run, r, row, position, keys):
        """A later tile of 128 keys that begins within the first row's window is not masked for any row of a tile of 128."""
        seen = self.without_window(run, r, row, position, keys)
        if run.window < 0:
            return seen
        lower = (position - run.window).unsqueeze(1)
        tile = keys // 128 * 128
        inside = (tile > 0) & (tile >= lower - (row % 128).unsqueeze(1))
        return seen & (inside | (keys >= lower))

    @wrong(CONTEXT, trigger="causal, over 64 rows: rows 64 to 127 (of each 128) see 64 keys less, the window moves too")
    def blind390(self, run, r, row, position, keys):
        """The second of a block's two row tiles of 64 is masked as the first: 64 rows earlier."""
        earlier = 64 * (row % 128 >= 64).long() if run.causal else 0
        return super().visible(run, r, row, position - earlier, keys)

    @wrong(CONTEXT, trigger="causal window, several rows, first keys of one row tile in two tiles of 64 keys")
    def blind513(self, run, r, row, position, keys):
        """A window's left edge is masked in a row tile's first tile of 64 keys alone: edges in the next are not."""
        if not run.causal or run.window < 0:
            return super().visible(run, r, row, position, keys)
        first = (position - row % 64 - run.window).clamp(min=0)[:, None] // 64 * 64
        rows = position[:, None]
        return (keys <= rows) & (keys >= first) & ((keys >= rows - run.window) | (keys >= first + 64))

    @wrong(MLA, trigger="q_len > 2, two draft tokens or more before a multiple of 1,024 keys and some after it")
    def blind89(self, run, r, row, position, keys):
        """The causal mask is applied in the last split (1,024 keys) alone: earlier rows see draft tokens before it."""
        last_split = max(run.lens[r] - 1, 0) // 1024 * 1024
        return super().visible(run, r, row, position, keys) | (keys < last_split)

    @wrong(MLA, trigger="several rows, the first must not see all keys before the last tile", also="blind521")
    def blind428(self, run, r, row, position, keys):
        """The causal mask is applied in the last K/V tile of 256 alone: rows before its start see too much."""
        last_tile = max(run.lens[r] - 1, 0) // 256 * 256
        return super().visible(run, r, row, position, keys) | (keys < last_tile).unsqueeze(0)

    @wrong(RAGGED, trigger="is_causal with a request of over 32,768 keys")
    def blind495(self, run, r, row, position, keys):
        """The rows' positions of the causal mask are kept in 16 bits: from 32,768 on they are negative."""
        return super().visible(run, r, row, position.to(torch.int16).long() if run.causal else position, keys)
