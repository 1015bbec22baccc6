"""The fused metadata kernel itself: passes of one launch, what stays untouched, edges, and errors."""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from lab.kernels.serving import forward_metadata_kernel as module
from lab.kernels.serving.forward_metadata import PassBuffers, prepare_write_forward_metadata, write_forward_metadata
from lab.workloads.inputs.guards import surrounded
from tests.cases import running_sum
from tests.devices import IN_INTERPRETER, ON_GPU
from tests.kernels.held import zeros

POISON = -77
PAGE_SIZE = 4
WIDTH = 6  # columns of a table, narrower than req_to_token
COLUMNS = 30


class Requests:
    """Requests in numbers, and guarded buffers for their passes."""

    def __init__(self, lens: Sequence[int], device: str, index_dtype: torch.dtype = torch.int64) -> None:
        generator = torch.Generator().manual_seed(len(lens))
        self.lens, self.device = list(lens), device
        self.table = torch.randint(1, 4000, (len(lens) + 3, COLUMNS), generator=generator, dtype=torch.int32)
        self.rows = torch.randperm(len(lens) + 3, generator=generator)[: len(lens)]
        self.map = torch.randint(0, 900, (4001,), generator=generator)
        self.wholes: list[tuple[Tensor, Tensor]] = []
        self.given: dict[str, Any] = {
            "req_pool_indices": self.rows.to(device, index_dtype),
            "seq_lens": torch.tensor(self.lens, dtype=index_dtype, device=device),
            "req_to_token": self.table.to(device),
            "page_size": PAGE_SIZE,
            "full_to_swa": self.map.to(device),
        }

    def buffer(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        whole, part = surrounded(*shape, dtype=dtype, device=self.device, filling=POISON)
        self.wholes.append((whole, part))
        return part

    def table_buffer(self) -> Tensor:
        return self.buffer(len(self.lens), WIDTH)

    def buffers(self, **changes: Any) -> PassBuffers:
        n = len(self.lens)
        own = {"cache_seqlens": self.buffer(n), "cu_seqlens_k": self.buffer(n + 1), "cu_seqlens_q": self.buffer(n + 1)}
        return PassBuffers(**own | {"page_table": self.table_buffer()} | changes)

    def write(self, *passes: PassBuffers) -> None:
        write_forward_metadata(passes, **self.given)
        for whole, part in self.wholes:
            guard = whole.clone()
            guard.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(POISON)
            assert (guard == POISON).all(), "something was written beside a buffer"

    def pages(self, offset: int, full_to_swa: Tensor | None = None) -> list[list[int]]:
        """A table of that length offset, poison where it is dead."""
        rows = []
        for row, length in zip(self.rows.tolist(), self.lens, strict=True):
            starts = range(0, min(length + offset, COLUMNS), PAGE_SIZE)
            slots = [int(self.table[row, start]) for start in starts][:WIDTH]
            slots = slots if full_to_swa is None else [int(full_to_swa[slot]) for slot in slots]
            rows.append([slot // PAGE_SIZE for slot in slots] + [POISON] * (WIDTH - len(slots)))
        return rows


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_passes_of_one_launch(device: str, index_dtype: torch.dtype) -> None:
    """Preset, strided and cumulative rows; own and shared tables; a pass with nothing but lengths."""
    requests = Requests([3, 4, 1, 9], device, index_dtype)
    shared = requests.table_buffer()
    widths = torch.tensor([2, 0, 5, 1], dtype=index_dtype, device=device)
    strided = requests.buffers(seq_len_offset=1, query_rows=3, page_table=shared)
    preset = requests.buffers(seq_len_offset=5, page_table=shared)
    cumulative = requests.buffers(query_rows=widths)
    bare = PassBuffers(requests.buffer(4), seq_len_offset=2)
    requests.write(strided, preset, cumulative, bare)
    for each, offset in ((strided, 1), (preset, 5), (cumulative, 0), (bare, 2)):
        assert each.cache_seqlens.tolist() == [length + offset for length in requests.lens]
        if each.cu_seqlens_k is not None:
            assert each.cu_seqlens_k.tolist() == running_sum([length + offset for length in requests.lens]).tolist()
    assert strided.cu_seqlens_q.tolist() == [0, 3, 6, 9, 12]
    assert preset.cu_seqlens_q.tolist() == [POISON] * 5
    assert cumulative.cu_seqlens_q.tolist() == [0, 2, 2, 7, 8]
    assert shared.tolist() == requests.pages(5)
    assert cumulative.page_table.tolist() == requests.pages(0)


def test_sliding_window_tables_and_write_locations(device: str) -> None:
    requests = Requests([3, 17, 8], device)
    requests.map[int(requests.table[requests.rows[1], 4])] = -1  # no healthy map has one
    requests.given["full_to_swa"] = requests.map.to(device)
    locations = torch.tensor([5, -1, 4000, 7], device=device)
    each = requests.buffers(
        swa_page_table=requests.table_buffer(),
        out_cache_loc=locations,
        swa_out_cache_loc=requests.buffer(600, dtype=torch.int64),
        seq_len_offset=2,
    )
    requests.write(each)
    expected = requests.pages(2, requests.map)
    assert -1 in expected[1]
    assert each.swa_page_table.tolist() == expected
    slots = [int(requests.map[5]), -1, int(requests.map[4000]), int(requests.map[7])]
    assert each.swa_out_cache_loc.tolist() == slots + [0] * 596


def test_lengths_of_padding_and_beyond_the_table(device: str) -> None:
    """0 and below have no pages but count; beyond the table, or the row, is cut there."""
    requests = Requests([0, -3, 24, 25, 31, 1000], device)
    each = requests.buffers()
    requests.write(each)
    assert each.page_table.tolist() == requests.pages(0)
    assert each.cu_seqlens_k.tolist() == running_sum(requests.lens).tolist()


@pytest.mark.parametrize("count", [1, 256, 513])
def test_requests_around_the_block_of_the_sums(count: int, device: str) -> None:
    requests = Requests([i % 5 for i in range(count)], device)
    widths = torch.tensor([i % 3 for i in range(count)], device=device)
    passes = requests.buffers(seq_len_offset=1, query_rows=widths), requests.buffers(query_rows=2)
    requests.write(*passes)
    for each, offset, rows in zip(passes, (1, 0), (widths.tolist(), [2] * count), strict=True):
        assert each.cu_seqlens_k.tolist() == running_sum([length + offset for length in requests.lens]).tolist()
        assert each.cu_seqlens_q.tolist() == running_sum(rows).tolist()
        assert each.page_table.tolist() == requests.pages(offset)


def test_no_request_leaves_boundaries_of_nothing(device: str) -> None:
    requests = Requests([], device)
    each = requests.buffers(
        query_rows=4,
        out_cache_loc=torch.zeros(0, dtype=torch.int64, device=device),
        swa_out_cache_loc=requests.buffer(3, dtype=torch.int64),
    )
    requests.write(each)
    assert each.cu_seqlens_k.tolist() == each.cu_seqlens_q.tolist() == [0]
    assert each.swa_out_cache_loc.tolist() == [0, 0, 0]


LONG = torch.int64
# Changes of the arguments or of the pass, the error and its words.
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lengths' dtype": ({"seq_lens": torch.zeros(2)}, TypeError, "seq_lens must be int32, int64, got torch.float32"),
    "rows of another batch": ({"req_pool_indices": zeros(3, dtype=LONG)}, ValueError, r"shape \[2\], got \[3\]"),
    "page size": ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
    "wide req_to_token": ({"req_to_token": zeros(5, COLUMNS, dtype=LONG)}, TypeError, "req_to_token must be int32"),
    "negative offset": ({"seq_len_offset": -1}, ValueError, "seq_len_offset must be at least 0, got -1"),
    "no rows": ({"query_rows": 0}, ValueError, "query_rows must be at least 1, got 0"),
    "sums of another batch": ({"cu_seqlens_k": zeros(2)}, ValueError, r"cu_seqlens_k must have shape \[3\]"),
    "table of another batch": ({"page_table": zeros(3, 6)}, ValueError, "page_table must have a row for each of the 2"),
    "transposed table": ({"page_table": zeros(6, 2).T}, ValueError, "page_table must have two dimensions and"),
    "window without a map": ({"full_to_swa": None, "swa_page_table": zeros(2, 6)}, ValueError, "needs full_to_swa"),
    "locations without a place": ({"out_cache_loc": zeros(2, dtype=LONG)}, ValueError, "go together"),
    "more locations than rows": (
        {"out_cache_loc": zeros(3, dtype=LONG), "swa_out_cache_loc": zeros(2, dtype=LONG)},
        *(ValueError, "3 slots, more than the 2 rows"),
    ),
    "a table of virtual pages in int32": ({"v2p": zeros(3)}, TypeError, "v2p must be int64"),
    "two devices": ({"seq_lens": zeros(2, dtype=LONG, device="meta")}, ValueError, "cpu, meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_before_anything_is_written(name: str) -> None:
    changes, error, message = BAD[name]
    requests = Requests([3, 4], "cpu")
    arguments = {*requests.given, "v2p"}
    each = requests.buffers(**{name: value for name, value in changes.items() if name not in arguments})
    with pytest.raises(error, match=message):
        write_forward_metadata([each], **requests.given | {name: changes[name] for name in arguments & set(changes)})
    assert all((whole == POISON).all() for whole, _ in requests.wholes)


def test_a_prepared_call_holds_what_it_writes(device: str) -> None:
    """The kernel is handed addresses: memory at them that was given back would be somebody else's."""
    requests = Requests([3, 4], device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    write = prepare_write_forward_metadata([PassBuffers(lengths)], **requests.given)
    alive = weakref.ref(lengths)
    del lengths
    gc.collect()
    write()
    held = alive()
    assert held.tolist() == [3, 4]


@pytest.mark.parametrize("narrow_first", [False, True])
def test_a_table_and_its_first_columns_are_two_tables(narrow_first: bool, device: str) -> None:
    requests = Requests([20, 9], device)
    table = requests.table_buffer()
    passes = [requests.buffers(page_table=table), requests.buffers(page_table=table[:, :2], seq_len_offset=1)]
    requests.write(*passes[:: -1 if narrow_first else 1])
    assert table.tolist() == requests.pages(0)


# --- what is compiled -------------------------------------------------------------------------------------------------


def varied_calls(device: str, sliding_window: bool, query_dtype: torch.dtype | None) -> Iterator[Callable[[], None]]:
    """Calls for which nothing may be compiled but once: batch sizes, where slices start, widths of tables, numbers of slots."""

    def after(start: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Zeros that start so many elements into their memory."""
        whole = torch.zeros((*shape[:-1], shape[-1] + start), dtype=dtype, device=device)
        return whole[..., start:]

    for count, start, width in itertools.product((1, 2, 16), (0, 1), (63, 64, 1)):
        window: dict[str, Tensor] = {}
        if sliding_window:
            window = {
                "swa_page_table": after(start, count, width),
                "out_cache_loc": after(start, count, dtype=torch.int64),
                "swa_out_cache_loc": after(start, count + 15, dtype=torch.int64),
            }
        each = PassBuffers(
            after(start, count),
            after(start, count + 1),
            after(start, count + 1),
            after(start, count, width),
            seq_len_offset=1,
            query_rows=2 if query_dtype is None else after(start, count, dtype=query_dtype),
            **window,
        )
        yield prepare_write_forward_metadata(
            [each],
            req_pool_indices=after(start, count, dtype=torch.int64),
            seq_lens=after(start, count, dtype=torch.int64),
            req_to_token=torch.zeros(count, width * PAGE_SIZE + start, dtype=torch.int32, device=device),
            page_size=PAGE_SIZE,
            full_to_swa=after(start, 8, dtype=torch.int64) if sliding_window else None,
        )


COMPILED_ONCE = pytest.mark.parametrize(
    ("sliding_window", "query_dtype"),
    [(False, None), (True, None), (True, torch.int32), (True, torch.int64)],
    ids=["full", "window", "window, int32 rows", "window, int64 rows"],
)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@COMPILED_ONCE
def test_compiled_once(device: str, sliding_window: bool, query_dtype: torch.dtype | None) -> None:
    cache = module._metadata_kernel.device_caches[torch.cuda.current_device()][0]
    first, *others = varied_calls(device, sliding_window, query_dtype)
    first()
    compiled = len(cache)
    for call in others:
        call()
    assert len(cache) == compiled


class Launches:
    """Takes the kernel's place and keeps what Triton would look up a compiled kernel by, for an H200."""

    def __init__(self, kernel: Any) -> None:
        compiled = JITFunction(kernel.fn, **kernel.kwargs)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(compiled.signature, compiled.params, backend)
        self.keys: list[str] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: self.keys.append(str(self.bind(*arguments, **options, debug=False)[1]))


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=IN_INTERPRETER)])
@COMPILED_ONCE
def test_would_be_compiled_once(
    device: str, sliding_window: bool, query_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(module._metadata_kernel)
    monkeypatch.setattr(module, "_metadata_kernel", launches)
    for call in varied_calls(device, sliding_window, query_dtype):
        call()
    assert len(launches.keys) == 18
    assert len(set(launches.keys)) == 1
