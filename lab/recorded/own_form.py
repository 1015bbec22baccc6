"""Calls in the lab's own form: one file for each call, which holds only the pages that the call reads.

A file is a dictionary of plain values and tensors, saved by `torch.save`. A tensor is stored as its bytes, with dtype, shape,
strides, storage offset and its address modulo 256. A read tensor has these strides and this alignment again. Pages have new
ids, in the order of the engine's ids, which the file holds too.
"""

import math
import numbers
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.calls import AttentionCall
from lab.recorded.call import ALIGNMENT_BYTES, DAMAGED, RESULTS, RecordedCall, RecordingError, placed, unrepeated
from lab.references.paged_attention import indexed

FORM, VERSION = "a call recorded by trtllm-attention-lab", 1
POOLS = ("kv_cache", "kv_cache_sf")  # arguments whose first dimension counts pages
SCRATCH = ("workspace_buffer", "multi_ctas_kv_counter_buffer")  # arguments whose contents are not kept
MOST_COPIED_BYTES = 64 * 2**20  # of a pool at once, since an engine leaves little memory free
_NAME = re.compile(
    r"(?P<time>[\d_]+)_pid\d+_(?P<function>\w+?)(_layer(?P<layer>\d+))?_call(?P<number>\d+)(_replay(?P<replay>\d+))?\.pt"
)


@dataclass(frozen=True)
class OwnCall:
    """A file that holds one eager call, or one replay of a captured call.

    Attributes:
        path: the file.
        function: the name of the function that was called.
        time: time of the call or of the replay, as a text that sorts by time.
        number: the number of the call in its process; a replay has the number of the captured call.
        layer: the layer of the model; None if the recorder did not find it.
        replay: the number of the replay; 0 for an eager call.
    """

    path: Path
    function: str
    time: str
    number: int = 0
    layer: int | None = None
    replay: int = 0

    @classmethod
    def at(cls, path: Path) -> "OwnCall | None":
        """Return the call that a file's name describes; None for a name of another form."""
        if (found := _NAME.fullmatch(path.name)) is None:
            return None
        layer = None if found["layer"] is None else int(found["layer"])
        return cls(path, found["function"], found["time"], int(found["number"]), layer, int(found["replay"] or 0))

    def read(self) -> RecordedCall:
        """Read the call.

        Raises:
            RecordingError: the file is damaged, in another form or of a newer release, or lacks the value of an argument.
        """
        try:
            record = torch.load(self.path, map_location="cpu", weights_only=True)
            if not isinstance(record, dict) or record.get("form") != FORM:
                raise RecordingError(f"{self.path} is no call that the lab recorded")
            if record["version"] > VERSION:
                raise RecordingError(
                    f"{self.path} is of version {record['version']}, and this release of the lab reads up to {VERSION}"
                )
            return _call(self.path, record)
        except RecordingError:
            raise
        except DAMAGED as error:
            raise RecordingError(f"{self.path} is damaged: {(str(error).splitlines() or [repr(error)])[0]}") from error


def own_calls(folder: Path) -> list[OwnCall]:
    """Return the calls of a folder in the lab's own form, in the order of time."""
    calls = [call for path in folder.glob("*.pt") if (call := OwnCall.at(path))]
    return sorted(calls, key=lambda call: (call.time, call.number))


def record_of(function: AttentionCall, given: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the arguments of a call to the host, and return what `write` writes. Waits for the GPU.

    Args:
        function: the function that was called.
        given: the arguments by name.
        about: facts about the call, such as "versions", a dictionary of plain values.
    """
    copied: dict[Any, Any] = {}
    arguments = {
        name: _kept(value, copied) for name, value in given.items() if name not in (*POOLS, *SCRATCH, *RESULTS)
    }
    arguments |= {name: _kept(given[name], has_contents=False) for name in (*SCRATCH, *RESULTS) if name in given}
    pages = None
    if "block_tables" in given:
        pages, is_read = _pages_read(given)
        tables = _renumbered(given["block_tables"], pages, is_read, _first_pool(given).shape[0])
        arguments["block_tables"] = _kept(given["block_tables"], data=tables)
        arguments |= {name: _kept(given[name], copied, pages) for name in POOLS if name in given}
    return {
        "form": FORM,
        "version": VERSION,
        "function": function.value,
        **about,
        "arguments": arguments,
        "results": {},
        "pages": pages,
    }


def with_results(record: Mapping[str, Any], **results: torch.Tensor | None) -> dict[str, Any]:
    """Return a record with `out` and `lse`, copied to the host. Waits for the GPU."""
    return {**record, "results": {name: _kept(value) for name, value in results.items()}}


def name_of(record: Mapping[str, Any]) -> str:
    """Return the name of a record's file, which `OwnCall.at` reads. Names sort by time."""
    layer = "" if record["layer"] is None else f"_layer{record['layer']}"
    replay = f"_replay{record['replay']:06d}" if record["replay"] else ""
    start = f"{record['time']}_pid{record['process']}_{record['function']}"
    return f"{start}{layer}_call{record['number']:06d}{replay}.pt"


def size_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a record."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(size_bytes(each) for each in value.values())
    return sum(size_bytes(each) for each in value) if isinstance(value, tuple | list) else 0


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record to a file. A reader never sees a part of it."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    torch.save(dict(record), unfinished)
    unfinished.replace(path)


def unkept(why: str) -> dict[str, Any]:
    """Return what stands in a record for an argument whose value is not there; `why` completes "does not hold <name>: "."""
    return {"kind": "unkept", "why": why}


def _first_pool(given: Mapping[str, Any]) -> torch.Tensor:
    pool = given["kv_cache"]
    first: torch.Tensor = pool[0] if isinstance(pool, tuple | list) else pool
    return first


def _pages_read(given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages that a call reads.

    Pages before every row's window are not read. Each row of a request with separate tables of K and V names pages of one pool
    or of two equal pools, from both of which the pages of both tables are kept.

    Returns:
        The ids of the pages, int64, sorted, without ids outside the pool; and bool, of the tables' shape: the cells that the
        call reads.
    """
    pool, tables, seq_lens = _first_pool(given), given["block_tables"].cpu(), given["seq_lens"].cpu().long()
    is_shared = given.get("uses_shared_paged_kv_idx", True)
    if tables.dim() != (2 if is_shared else 3) or len(tables) != len(seq_lens):
        raise ValueError(f"block_tables of shape {list(tables.shape)} are no page tables of {len(seq_lens)} requests")
    page_size = pool.shape[-3 if given.get("kv_layout") == "NHD" else -2]
    window, q_len = given.get("window_left", -1), max(given.get("q_len_per_req") or 1, given.get("max_q_len") or 0)
    first = ((seq_lens - q_len - window).clamp(min=0) if window >= 0 else torch.zeros_like(seq_lens)) // page_size
    end = -(-seq_lens.clamp(min=0) // page_size)
    column = torch.arange(tables.shape[-1])
    is_read = (column >= first[:, None]) & (column < end[:, None])
    is_read = is_read if is_shared else is_read[:, None].expand_as(tables)
    ids = tables[is_read].long().unique()
    return ids[(ids >= 0) & (ids < pool.shape[0])], is_read


def _renumbered(tables: torch.Tensor, pages: torch.Tensor, is_read: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Return the tables on the host with new page ids. An id outside the pool stays; a cell that is not read gets page 0."""
    old = tables.cpu().long()
    in_pool = (old >= 0) & (old < num_pages)
    new = torch.where(is_read, torch.searchsorted(pages, old.clamp(0, max(num_pages - 1, 0))), 0)
    return torch.where(in_pool, new, old).to(tables.dtype)


def _kept(
    value: Any,
    copied: dict[Any, Any] | None = None,
    pages: torch.Tensor | None = None,
    *,
    data: torch.Tensor | None = None,
    has_contents: bool = True,
) -> Any:
    """Return a value as a record holds it.

    Args:
        value: an argument or a result.
        copied: the tensors copied so far, so that a tensor that is given twice is stored once.
        pages: the pages to keep of a pool; None: everything is kept.
        data: the contents to store, if they are not the tensor's.
        has_contents: False: a tensor's contents are not kept.
    """
    if isinstance(value, torch.Tensor):
        memo = {} if copied is None else copied
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, has_contents)
        if key not in memo:
            memo[key] = _kept_tensor(value, pages, data, has_contents)
        return memo[key]
    if isinstance(value, tuple | list):
        items = [_kept(each, copied, pages, has_contents=has_contents) for each in value]
        return {"kind": "tuple" if isinstance(value, tuple) else "list", "items": items}
    if value is None or isinstance(value, str | bool | torch.dtype) or (isinstance(value, dict) and "kind" in value):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return unkept(f"it is of type {type(value).__name__}")


def _kept_tensor(
    tensor: torch.Tensor, pages: torch.Tensor | None, data: torch.Tensor | None, has_contents: bool
) -> dict[str, Any]:
    bytes_of_it = None
    if has_contents:
        bytes_of_it = _bytes(tensor if data is None else data) if pages is None else _bytes_of_pages(tensor, pages)
    return {
        "kind": "tensor",
        "dtype": tensor.dtype,
        "shape": list(tensor.shape if pages is None else (len(pages), *tensor.shape[1:])),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "address": tensor.data_ptr() % ALIGNMENT_BYTES,
        "device": tensor.device.type,
        "bytes": bytes_of_it,
    }


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as uint8 on the host, without gaps. An expanded dimension is stored once."""
    once = unrepeated(tensor.detach())
    return once.to("cpu", copy=True, memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _bytes_of_pages(pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    page_bytes = math.prod(pool.shape[1:]) * pool.element_size()
    at_once = max(1, MOST_COPIED_BYTES // max(page_bytes, 1))
    parts = [_bytes(indexed(pool.detach(), part.to(pool.device))) for part in pages.split(at_once)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _call(path: Path, record: Mapping[str, Any]) -> RecordedCall:
    given = {name: _restored(path, name, value) for name, value in record["arguments"].items()}
    results = {name: _restored(path, name, value) for name, value in record["results"].items()}
    pages = record["pages"]
    return RecordedCall(
        AttentionCall(record["function"]),
        given,
        results.get("out"),
        results.get("lse"),
        {str(name): str(version) for name, version in record["versions"].items()},
        gpu=str(record["gpu"]),
        pages=None if pages is None else tuple(pages.tolist()),
    )


def _restored(path: Path, name: str, value: Any) -> Any:
    """Return a value of a record as it was given to the call."""
    if not isinstance(value, dict):
        return value
    match value["kind"]:
        case "tensor":
            return _restored_tensor(value)
        case "tuple":
            return tuple(_restored(path, name, each) for each in value["items"])
        case "list":
            return [_restored(path, name, each) for each in value["items"]]
    raise RecordingError(f"{path} does not hold {name}: {value['why']}")


def _restored_tensor(kept: Mapping[str, Any]) -> torch.Tensor:
    tensor = placed(kept["shape"], kept["stride"], kept["dtype"], kept["address"])
    if kept["bytes"] is not None:
        once = unrepeated(tensor)
        once.copy_(kept["bytes"].view(kept["dtype"]).view(once.shape))
    return tensor
