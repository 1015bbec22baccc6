"""Calls in the lab's own form: one file for each call, which holds only the pages that the call reads.

A file begins with the line `FORM`. The elements of the tensors follow, without gaps, one tensor after the other. The file ends
with the record, which is compressed JSON, and the record's size in bytes. The record has the arguments as FlashInfer's recorder
writes them (`lab.recorded.flashinfer_dumps`), and for each tensor the dtype, shape, strides, address modulo 256 and place in
the file. A read tensor has these strides and this alignment again, but pages that share memory are kept apart. Pages have new
ids, in the order of the engine's ids, which the record holds too. Contents of the workspace are not kept.
"""

import json
import math
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lab.calls import AttentionCall
from lab.provenance import version_of
from lab.recorded.call import (
    ALIGNMENT_BYTES,
    RESULTS,
    ListedCall,
    RecordedCall,
    RecordingError,
    placed,
    reading,
    unrepeated,
)
from lab.recorded.flashinfer_dumps import value_of
from lab.references.quantization import indexed

PACKAGES = {"flashinfer": "flashinfer-python", **{name: name for name in ("torch", "triton", "sglang", "vllm")}}
FORM, VERSION = b"a call recorded by trtllm-attention-lab\n", 2
SUFFIX = ".call"
END = ".end"  # of a file that says why a process recorded no further call
SIZE_BYTES = 8  # of the record's size, an unsigned little-endian integer
POOLS = ("kv_cache", "kv_cache_sf")  # arguments whose first dimension counts pages
UNKEPT = ("workspace_buffer", "multi_ctas_kv_counter_buffer", *RESULTS)  # arguments whose contents are not kept
OVERLAPPING = (
    "elements of kv_cache share memory in the engine, and are kept apart, so that strides and alignment are lost"
)
MOST_COPIED_BYTES = 64 * 2**20  # of a pool at once, since an engine leaves little memory free
_NAME = re.compile(r"([\d_]+)_pid\d+_(\w+?)(?:_layer(\d+))?_call(\d+)(?:_replay(\d+))?\.call", re.ASCII)


@dataclass(frozen=True)
class MadeCall:
    """A call of an engine, as it is written. `out` is None until it returns. The fields `number` to `replay` are as in
    `ListedCall`, and the last ones as in `RecordedCall`.
    """

    function: AttentionCall
    given: Mapping[str, Any]
    number: int
    layer: int | None
    time: str
    replay: int = 0
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    raised: str = ""
    module: str = ""

    def returning(self, returned: Any) -> "MadeCall":
        """Return the call with the results that the function returned or wrote."""
        out, lse = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (returned, None)
        given_out, given_lse = (self.given.get(name) for name in RESULTS)
        return replace(self, out=given_out if out is None else out, lse=given_lse if lse is None else lse)

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        return f"call {self.number}{layer}{f', replay {self.replay}' if self.replay else ''}"


def own_calls(folder: Path) -> list[ListedCall]:
    """Return the calls of a folder in the lab's own form, in the order of time."""
    found = [(path, match.groups()) for path in folder.glob(f"*{SUFFIX}") if (match := _NAME.fullmatch(path.name))]
    return sorted(
        ListedCall(time, int(number), int(replay or 0), path, function, None if layer is None else int(layer))
        for path, (time, function, layer, number, replay) in found
    )


def ends(folder: Path) -> list[str]:
    """Return sentences about the processes whose recording in a folder ended at its limit."""
    texts = []
    for path in sorted(folder.glob(f"*{END}")):
        with reading(path) as regular:
            texts.append(regular.read_text())
    return texts


def read(path: Path) -> RecordedCall:
    """Read a call.

    Raises:
        RecordingError: the file is damaged, in another form or of a newer release, or lacks the value of an argument.
    """
    with reading(path) as regular:
        with regular.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if not FORM.startswith(content[: len(FORM)]):
            raise RecordingError(f"{path} is no call that the lab recorded")
        end = len(content) - SIZE_BYTES
        start = end - int.from_bytes(content[end:], "little")
        record = json.loads(zlib.decompress(content[start:end]))
        if record["version"] != VERSION:
            raise RecordingError(f"{path} is of version {record['version']}; this release of the lab reads {VERSION}")

        def restored(name: str, value: Any, has_contents: bool = True) -> Any:
            return value_of(path, name, value, lambda described: _tensor(described, content, has_contents))

        return RecordedCall(
            AttentionCall(record["function"]),
            {name: restored(name, value, name not in UNKEPT) for name, value in record["arguments"].items()},
            restored("out", record["out"]),
            restored("lse", record["lse"]),
            {str(name): str(version) for name, version in record["versions"].items()},
            lost=tuple(map(str, record.get("lost", ()))),
            gpu=str(record["gpu"]),
            raised=str(record.get("raised", "")),
            module=str(record.get("module", "")),
            pages=None if record["pages"] is None else tuple(map(int, record["pages"])),
        )


def versions() -> dict[str, str]:
    """Return the version of each package that a record names; "" if it is not installed."""
    return {name: version_of(package) or "" for name, package in PACKAGES.items()}


def gpu() -> str:
    """Return the name of the GPU; "" if there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def write(folder: Path, call: MadeCall, versions: Mapping[str, str]) -> Path:
    """Copy a call to the host, write its file, and return the path. Waits for the GPU. No reader sees a part of the file."""
    layer = "" if call.layer is None else f"_layer{call.layer}"
    replay = f"_replay{call.replay:06d}" if call.replay else ""
    start = f"{call.time}_pid{os.getpid()}_{call.function.value}"
    path = folder / f"{start}{layer}_call{call.number:06d}{replay}{SUFFIX}"
    unfinished, given, pages = path.with_suffix(".unfinished"), dict(call.given), None
    if "block_tables" in given:
        pages, given["block_tables"] = _renumbered(given)
    try:
        with unfinished.open("wb") as file:
            file.write(FORM)
            arguments = {
                name: _kept(value, file, pages if name in POOLS else None, has_contents=name not in UNKEPT)
                for name, value in given.items()
            }
            record: dict[str, Any] = {"version": VERSION, "function": call.function.value, "arguments": arguments}
            record |= {"out": _kept(call.out, file), "lse": _kept(call.lse, file)}
            record |= {"raised": call.raised, "module": call.module}
            record |= {"pages": None if pages is None else pages.tolist(), "versions": dict(versions), "gpu": gpu()}
            record["lost"] = [OVERLAPPING] if pages is not None and _has_overlap(given["kv_cache"], len(pages)) else []
            content = zlib.compress(json.dumps(record).encode())
            file.write(content + len(content).to_bytes(SIZE_BYTES, "little"))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _kept(value: Any, file: BinaryIO, pages: torch.Tensor | None = None, *, has_contents: bool = True) -> Any:
    """Return an argument or result as a record holds it. Write the contents of a tensor, only those of some pages, or none."""
    if isinstance(value, torch.Tensor):
        shape = value.shape if pages is None else (len(pages), *value.shape[1:])
        is_apart = pages is not None and _has_overlap(value, len(pages))
        described = {
            "type": "torch.Tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(shape),
            "stride": list(torch.empty(shape, device="meta").stride() if is_apart else value.stride()),
            "address": value.data_ptr() % ALIGNMENT_BYTES,
        }
        if not has_contents:
            return described
        start = file.tell()
        for part in (value,) if pages is None else _parts(value, pages):
            file.write(_bytes(part).numpy().data)
        return described | {"start": start, "end": file.tell()}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        items = [_kept(each, file, pages, has_contents=has_contents) for each in value]
        return {"type": kind, "truncated": False, "items": items}
    if isinstance(value, Enum):
        return _kept(value.value, file)
    if isinstance(value, torch.dtype):
        return {"type": "torch.dtype", "value": str(value)}
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return {"type": "lost", "why": value.why if isinstance(value, Lost) else f"it is of type {type(value).__name__}"}


@dataclass(frozen=True)
class Lost:
    """Stands for an argument whose value is gone. `why` completes "does not hold the argument: "."""

    why: str


def apart_from_results(given: Mapping[str, Any], saved: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """Return arguments with `saved(tensor)` in place of each input that shares memory with `out` or `lse`, because the call
    overwrites it. `out` and `lse` stay.
    """
    spans = {name: _span(value) for name, value in given.items() if isinstance(value, torch.Tensor)}
    written = [spans[name] for name in RESULTS if name in spans]
    apart = dict(given)
    for name in spans.keys() - {*RESULTS}:
        if any(spans[name].start < each.stop and each.start < spans[name].stop for each in written):
            apart[name] = saved(given[name])
    return apart


def _span(tensor: torch.Tensor) -> range:
    """Return the addresses of a tensor's bytes, those of gaps included."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start := tensor.data_ptr(), start + (last + 1) * tensor.element_size() if tensor.numel() else start)


def _has_overlap(pool: Any, num_pages: int) -> bool:
    """Return True if `num_pages` pages with the strides of a pool, or of its K or V, may share memory. The compact cache of a
    block-sparse call is such a pool, and so is a pool with an expanded dimension.
    """
    if not isinstance(pool, torch.Tensor):
        return any(_has_overlap(side, num_pages) for side in pool)
    end = 1  # of the elements of the dimensions with smaller strides
    for step, size in sorted(zip(pool.stride(), (num_pages, *pool.shape[1:]), strict=True)):
        if size > 1:
            if step < end:
                return True
            end += (size - 1) * step
    return False


def _renumbered(given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages that a call reads, and its tables with new page ids.

    Pages before every row's window are not read. With separate tables of K and V, the pages of both tables are kept of both
    pools, and of a block-sparse call those of all K/V heads. An id outside the pool stays. A cell that is not read gets page 0.

    Returns:
        The engine's id of each kept page, int64, sorted; and the tables on the host, with their strides and alignment.
    """
    pool = given["kv_cache"][0] if isinstance(given["kv_cache"], tuple | list) else given["kv_cache"]
    whole = given["block_tables"]
    if given.get("sparse_mla_top_k"):
        return _renumbered_entries(whole, pool)
    tables, seq_lens = whole.cpu().long(), given["seq_lens"].cpu().long()
    by_kv_head, is_shared = (
        given.get("enable_block_sparse_attention", False),
        given.get("uses_shared_paged_kv_idx", True),
    )
    if tables.dim() != (2 if is_shared and not by_kv_head else 3):
        raise ValueError(f"block_tables of shape {list(tables.shape)} are no page tables")
    page_size = pool.shape[-3 if given.get("kv_layout") == "NHD" else -2]
    window, q_len = given.get("window_left", -1), max(given.get("q_len_per_req") or 1, given.get("max_q_len") or 0)
    first = ((seq_lens - q_len - window).clamp(min=0) if window >= 0 else torch.zeros_like(seq_lens)) // page_size
    end = -(-seq_lens.clamp(min=0) // page_size)
    column = torch.arange(tables.shape[-1])
    is_read = (column >= first[..., None]) & (column < end[..., None])
    is_read = is_read if is_shared else is_read[:, None].expand_as(tables)
    in_pool = (tables >= 0) & (tables < pool.shape[0])
    pages = tables[is_read & in_pool].unique()
    new = torch.where(is_read, torch.searchsorted(pages, tables.contiguous()), 0)
    renumbered = torch.where(in_pool, new, tables)
    stride = (
        whole.stride() if all(whole.stride()) else renumbered.stride()
    )  # rows of an expanded table become different
    return pages, placed(whole.shape, stride, whole.dtype, whole.data_ptr()).copy_(renumbered)


def _renumbered_entries(whole: torch.Tensor, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return as `_renumbered` the pages of selected entries, and the entries with new page ids. Entries that no row uses are
    kept too.
    """
    size, places = pool.shape[-2], whole.cpu().long()
    in_pool = (places >= 0) & (places < pool.shape[0] * size)
    pages = (places[in_pool] // size).unique()
    new = torch.searchsorted(pages, (places // size).contiguous()) * size + places % size
    moved = torch.where(in_pool, new, places)
    stride = whole.stride() if all(whole.stride()) else moved.stride()
    return pages, placed(whole.shape, stride, whole.dtype, whole.data_ptr()).copy_(moved)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as uint8 on the host, without gaps. An expanded dimension is stored once."""
    once = unrepeated(tensor.detach())
    return once.to("cpu", copy=True, memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _parts(pool: torch.Tensor, pages: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield copies of some pages of a pool on its device, a few at a time."""
    at_once = max(1, MOST_COPIED_BYTES // max(math.prod(pool.shape[1:]) * pool.element_size(), 1))
    return (indexed(pool.detach(), part.to(pool.device)) for part in pages.split(at_once))


def _tensor(described: Mapping[str, Any], content: mmap.mmap, has_contents: bool) -> torch.Tensor:
    """Return a tensor of a file's content as it was given to the call."""
    dtype = getattr(torch, described["dtype"])
    tensor = placed(described["shape"], described["stride"], dtype, described["address"])
    if has_contents and tensor.numel():
        once = unrepeated(tensor)
        kept = torch.frombuffer(memoryview(content)[described["start"] : described["end"]], dtype=dtype)
        once.copy_(kept.view(once.shape))
    return tensor
