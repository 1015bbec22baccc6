"""Write and read recorded calls in the lab's own format: one file per call, with only those pages of K and V that the call
reads.

A file is a ZIP archive. Its member `call.json` has the arguments, in the notation of FlashInfer's recorder (`decoded` in
`lab.recorded.call`), and the dtype, shape, strides and address modulo 256 of each tensor. The member `numbers`, compressed, has
the elements of page tables, lengths and masks, and the member `contents` those of all other tensors: without gaps, one tensor
after another. A tensor that is read from a file has the recorded strides and alignment, except that pages that shared memory in
the engine become separate. Pages get new ids in the order of the engine's ids, and the file has the engine's ids too. The
contents of the workspace are not recorded.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import torch
from torch import Tensor

from lab.calls.memory import may_overlap
from lab.provenance import version_of
from lab.recorded.call import (
    ALIGNMENT_BYTES,
    RESULTS,
    ListedCall,
    RecordedCall,
    RecordingError,
    decoded,
    placed,
    reading,
    recorded_function,
    size_bytes,
    unrepeated,
)

PACKAGES = {"flashinfer": "flashinfer-python", **{name: name for name in ("torch", "triton", "sglang", "vllm")}}
VERSION = 4
DESCRIPTION = "call.json"
MEMBERS = {"numbers": ZIP_DEFLATED, "contents": ZIP_STORED}  # compressing contents costs time and saves little
SUFFIX = ".call"
POOL = "kv_cache"  # the names of arguments whose first dimension counts pages begin with it
UNKEPT = ("workspace_buffer", "multi_ctas_kv_counter_buffer", *RESULTS)  # arguments whose contents are not kept
OVERLAPPING = "elements of kv_cache share memory in the engine, and are kept apart: strides and alignment are lost"
MOST_DESCRIPTION_BYTES = 2**24  # the arguments of a call have a few kB; a compressed member could expand to any size
MOST_COPIED_BYTES = 64 * 2**20  # most bytes of a pool that are copied to the host in one step
_NAME = re.compile(r"([\d_]+)_pid\d+_(\w+?)(?:_layer(\d+))?_call\d+(?:_replay(\d+))?\.call", re.ASCII)


def listed(folder: Path) -> list[ListedCall]:
    """Return the calls in a folder that are in the lab's own format, in the order of time, by their file names."""
    found = [
        (path, match.groups()) for path in sorted(folder.glob(f"*{SUFFIX}")) if (match := _NAME.fullmatch(path.name))
    ]
    return [
        ListedCall(path, function, time, int(replay or 0), None if layer is None else int(layer))
        for path, (time, function, layer, replay) in found
    ]


def read(path: Path) -> RecordedCall:
    """Read a call from its file. Raises RecordingError if the file is damaged, has another format or version, or lacks the
    value of an argument.
    """
    with reading(path) as regular, ZipFile(regular) as archive:
        kinds = {member.filename: member.compress_type for member in archive.infolist()}
        if DESCRIPTION not in kinds or not {*kinds.values()} <= {*MEMBERS.values()}:
            raise RecordingError(f"{path} is no call that the lab recorded, or was recorded by an earlier release")
        if (size := archive.getinfo(DESCRIPTION).file_size) > MOST_DESCRIPTION_BYTES:
            raise ValueError(f"{DESCRIPTION} has {size} bytes, more than {MOST_DESCRIPTION_BYTES}")
        record = json.loads(archive.read(DESCRIPTION))
        if record["version"] != VERSION:
            raise RecordingError(f"{path} is of version {record['version']}; this release of the lab reads {VERSION}")
        tensors = _restored(archive, record["tensors"])
        pages = tensors.get("pages")
        if pages is not None and not pages.is_contiguous():  # a list of repeated ids could be far larger than the file
            raise ValueError("the ids of pages are not contiguous")
        return RecordedCall(
            recorded_function(path, record["function"]),
            {name: decoded(path, name, value, tensors) for name, value in record["arguments"].items()},
            tensors.get("result out"),
            tensors.get("result lse"),
            {str(name): str(version) for name, version in record["versions"].items()},
            lost=tuple(map(str, record["lost"])),
            gpu=str(record["gpu"]),
            raised=str(record["raised"]),
            module=str(record["module"]),
            pages=None if pages is None else tuple(pages.tolist()),
        )


def versions() -> dict[str, str]:
    """Return the installed version of each package in `PACKAGES`; "" for a package that is not installed."""
    return {name: version_of(package) or "" for name, package in PACKAGES.items()}


def gpu() -> str:
    """Return the name of this machine's GPU; "" if there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def write(folder: Path, call: RecordedCall) -> Path:
    """Copy a call to the host and write it to a file in a folder; return the path. This waits for the GPU. The file gets its
    name when it is complete, so that no reader finds a part of it.
    """
    layer = "" if call.layer is None else f"_layer{call.layer}"
    replay = f"_replay{call.replay:06d}" if call.replay else ""
    start = f"{call.time}_pid{os.getpid()}_{call.function.value}"
    path = folder / f"{start}{layer}_call{call.number:06d}{replay}{SUFFIX}"
    given, pages, lost, tensors = dict(call.given), None, [], dict[str, Tensor]()
    if "block_tables" in given:
        pages, given["block_tables"] = _renumbered(given)
        lost = [OVERLAPPING] if _has_overlap(given["kv_cache"], len(pages)) else []
        tensors["pages"] = pages.int()
    record: dict[str, Any] = {"version": VERSION, "function": call.function.value, "gpu": gpu(), "lost": lost}
    record |= {"raised": call.raised, "module": call.module, "versions": dict(call.versions)}
    record["arguments"] = {name: _described(name, value, tensors) for name, value in given.items()}
    tensors |= {f"result {name}": result for name in RESULTS if (result := getattr(call, name)) is not None}
    kept_pages = {key: pages for key in tensors if key.startswith(POOL)}
    record["tensors"] = {key: _layout(tensor, kept_pages.get(key)) for key, tensor in tensors.items()}
    unfinished = path.with_suffix(".unfinished")
    try:
        with ZipFile(unfinished, "w") as archive:
            archive.writestr(DESCRIPTION, json.dumps(record), ZIP_DEFLATED)
            for member, compression in MEMBERS.items():
                (about := ZipInfo(member)).compress_type = compression
                with archive.open(about, "w", force_zip64=True) as file:
                    for key, tensor in tensors.items():
                        if key not in UNKEPT and _member(key, tensor.dtype) == member:
                            file.write(_elements(tensor, kept_pages.get(key)).numpy().data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _described(key: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert the value of an argument to JSON that `decoded` reads. Tensors are added to `tensors`; `key` is the key of the
    first one.
    """
    match value:
        case Tensor():
            tensors[key] = value
            return {"type": "torch.Tensor", "tensor_key": key}
        case tuple() | list():
            items = [_described(f"{key} {place}", each, tensors) for place, each in enumerate(value)]
            return {"type": "tuple" if isinstance(value, tuple) else "list", "truncated": False, "items": items}
        case Enum():
            return _described(key, value.value, tensors)
        case str():
            return str.__str__(value)  # of a subclass, too, whose own class may print something else
        case bool() | None:
            return value
        case Real():
            return int(value) if isinstance(value, Integral) else float(value)
        case torch.dtype():
            return {"type": "torch.dtype", "value": str(value)}
    return {"type": str(value) if isinstance(value, RecordingError) else f"of type {type(value).__name__}"}


def _layout(tensor: Tensor, pages: Tensor | None) -> dict[str, Any]:
    """Describe a tensor in JSON: dtype, shape, strides, and address modulo ALIGNMENT_BYTES. If `pages` is given, the tensor is
    a pool, and only its pages with these ids are recorded.
    """
    shape, stride = list(tensor.shape), tensor.stride()
    if pages is not None:
        shape[0] = len(pages)
        stride = torch.empty(shape, device="meta").stride() if _has_overlap(tensor, len(pages)) else stride
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": shape, "stride": stride, "address": tensor.data_ptr() % ALIGNMENT_BYTES}


def _member(key: str, dtype: torch.dtype) -> str:
    """Return which member of the archive has the elements of the tensor `key`: "contents" for floats and for a cache, else
    "numbers".
    """
    return "contents" if dtype.is_floating_point or key.startswith(POOL) else "numbers"


def _restored(archive: ZipFile, layouts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read tensors from an archive. `layouts` describes each as `_layout` does. Raises ValueError if the archive has too few
    elements, before memory for them is allocated.
    """
    members, tensors = {name: archive.open(name) for name in MEMBERS}, dict[str, Tensor]()
    left_bytes = {name: archive.getinfo(name).file_size for name in MEMBERS}
    for key, layout in layouts.items():
        dtype = getattr(torch, layout["dtype"])
        meta = torch.empty_strided(layout["shape"], layout["stride"], dtype=dtype, device="meta")
        member, size = _member(key, dtype), 0 if key in UNKEPT else unrepeated(meta).nbytes
        if size > left_bytes[member]:
            raise ValueError(f"{key} needs {size} bytes, and the file has {left_bytes[member]}")
        left_bytes[member] -= size
        tensors[key] = placed(meta, layout["address"])
        if key not in UNKEPT:
            once = unrepeated(tensors[key])
            elements = bytearray(members[member].read(size))
            once.copy_(torch.frombuffer(elements, dtype=dtype).view(once.shape) if size else once)
    return tensors


def apart_from_results(given: Mapping[str, Any], copies: bool) -> dict[str, Any]:
    """Return the arguments of a call, but replace inputs that share memory with `out` or `lse`, because the call will
    overwrite these inputs: by copies if `copies` is True, else by a RecordingError that says why they are lost.
    """
    starts = {name: value.data_ptr() for name, value in given.items() if isinstance(value, Tensor)}
    ends = {name: start + size_bytes(given[name]) for name, start in starts.items()}
    written, apart = starts.keys() & {*RESULTS}, dict(given)
    for name in starts.keys() - written:
        if any(starts[name] < ends[each] and starts[each] < ends[name] for each in written):
            lost = RecordingError("a tensor that the call overwrote in a CUDA graph")
            apart[name] = torch.clone(given[name]) if copies else lost
    return apart


def _has_overlap(pool: Any, num_pages: int) -> bool:
    """Return True if elements of a pool (a tensor or a pair of K and V) may share memory, judged by its strides for `num_pages`
    pages. The compact cache of a block-sparse call is such a pool, and so is a pool with an expanded dimension.
    """
    if not isinstance(pool, Tensor):
        return any(_has_overlap(side, num_pages) for side in pool)
    return may_overlap((num_pages, *pool.shape[1:]), pool.stride())


def _renumbered(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the ids of the pages that a call reads, and its page table with new page ids.

    Pages before the windows of all rows are not read. If K and V have separate tables, the pages of both tables are kept for K
    and for V. A block-sparse call keeps the pages of all K/V heads. If rows select entries, the pages of all columns are kept,
    also of columns that no row uses. An id outside the pool is not changed. A cell of the table that is not read gets page 0.

    Returns:
        The engine's id of each kept page, int64, sorted; and the new table on the CPU, with the strides and alignment of the
        old one.
    """
    pool = given["kv_cache"][0] if isinstance(given["kv_cache"], tuple | list) else given["kv_cache"]
    page_size = pool.shape[-3 if given.get("kv_layout") == "NHD" else -2]
    selects, whole = bool(given.get("sparse_mla_top_k")), given["block_tables"]
    in_page = page_size if selects else 1  # a cell names an entry of a page, or a page
    cells = whole.cpu().long().contiguous()
    is_read = torch.ones_like(cells, dtype=torch.bool) if selects else _read_cells(given, cells, page_size)
    ids = cells // in_page
    in_pool = (ids >= 0) & (ids < pool.shape[0])
    pages = ids[is_read & in_pool].unique()
    new = torch.where(is_read, torch.searchsorted(pages, ids) * in_page + cells % in_page, 0)
    renumbered = torch.where(in_pool, new, cells).to(whole.dtype)
    layout = whole if all(whole.stride()) else renumbered  # rows of an expanded table become different
    return pages, placed(layout, whole.data_ptr()).copy_(renumbered)


def _read_cells(given: Mapping[str, Any], tables: Tensor, page_size: int) -> Tensor:
    """Return a mask with the shape of `tables`: True for the cells of the page tables that a call reads."""
    is_shared, by_kv_head = given.get("uses_shared_paged_kv_idx", True), given.get("enable_block_sparse_attention")
    if tables.dim() != (2 if is_shared and not by_kv_head else 3):
        raise ValueError(f"block_tables of shape {list(tables.shape)} are no page tables")
    window, q_len = given.get("window_left", -1), max(given.get("q_len_per_req") or 1, given.get("max_q_len") or 0)
    seq_lens = given["seq_lens"].cpu().long()[..., None]
    first = (seq_lens - q_len - window).clamp(min=0) // page_size if window >= 0 else 0
    column = torch.arange(tables.shape[-1])
    is_read = (column >= first) & (column < -(-seq_lens.clamp(min=0) // page_size))
    return is_read if is_shared else is_read[:, None].expand_as(tables)


def _elements(tensor: Tensor, pages: Tensor | None) -> Tensor:
    """Return the bytes of a tensor's elements, uint8 on the CPU, without gaps. An expanded dimension is stored once. If `pages`
    is given, only the pages with these ids are copied, a few at a time, because an engine leaves little GPU memory free.
    """
    whole = tensor.detach()
    if pages is None:
        kept = unrepeated(whole).to("cpu", copy=True, memory_format=torch.contiguous_format)
    else:
        kept = torch.empty(len(pages), *whole.shape[1:], dtype=whole.dtype)
        at_once = max(1, MOST_COPIED_BYTES // max(math.prod(whole.shape[1:]) * whole.element_size(), 1))
        for part, some in zip(kept.split(at_once), pages.split(at_once), strict=True):
            part.copy_(whole[some.to(whole.device)])
    return kept.flatten().view(torch.uint8)
