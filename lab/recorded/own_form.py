"""Write and read recorded calls in the lab's own format: a ZIP archive per call, with only the pages that the call reads.

The archive's member `call.json` has the arguments, in the notation of FlashInfer's recorder, and the dtype, shape, strides and
address modulo 256 of each tensor. The compressed member `numbers` has the elements of page tables, lengths and masks;
`contents` has those of all other tensors. Pages are renumbered in the order of the engine's page ids, which the file also has.
"""

import json
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

from lab.calls.arguments import RESULTS, may_overlap
from lab.provenance import version_of
from lab.recorded.call import ALIGNMENT_BYTES, Listed, RecordedCall, RecordingError, decoded, distinct, placed, reading

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


def listed(folder: Path) -> list[Listed]:
    """List the calls in a folder that are in the lab's own format, in the order of time."""
    found = ((path, _NAME.fullmatch(path.name)) for path in sorted(folder.glob(f"*{SUFFIX}")))
    return [
        Listed(path, name[2], name[1], int(name[4] or 0), None if name[3] is None else int(name[3]))
        for path, name in found
        if name is not None
    ]


def read(path: Path) -> RecordedCall:
    """Read a call from its file. Raises RecordingError if the file is damaged or has another format or version."""
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
            RecordedCall.function_of(path, record["function"]),
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
    return {name: version_of(package) or "" for name, package in PACKAGES.items()}


def gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def write(folder: Path, call: RecordedCall) -> Path:
    """Write a call to a new file in a folder and return its path, after waiting for the GPU. The file is never incomplete."""
    layer = "" if call.layer is None else f"_layer{call.layer}"
    replay = f"_replay{call.replay:06d}" if call.replay else ""
    function = call.function.value
    path = folder / f"{call.time}_pid{os.getpid()}_{function}{layer}_call{call.number:06d}{replay}{SUFFIX}"
    given, pages, tensors = dict(call.given), None, dict[str, Tensor]()
    if "block_tables" in given:
        pages, given["block_tables"] = _renumbered(given)
        tensors["pages"] = pages.int()
    record: dict[str, Any] = {"version": VERSION, "function": function, "gpu": gpu(), "lost": [], "tensors": {}}
    record |= {"raised": call.raised, "module": call.module, "versions": dict(call.versions)}
    record["arguments"] = {name: _described(name, value, tensors) for name, value in given.items()}
    tensors |= {f"result {name}": result for name in RESULTS if (result := getattr(call, name)) is not None}
    kept_pages = {key: pages for key in tensors if key.startswith(POOL)}
    for key, tensor in tensors.items():
        shape, stride, address = list(tensor.shape), tensor.stride(), tensor.data_ptr() % ALIGNMENT_BYTES
        if (kept := kept_pages.get(key)) is not None:
            shape[0] = len(kept)
            if may_overlap(shape, stride):  # as in a block-sparse call's compact cache, or with an expanded dimension
                stride, record["lost"] = torch.empty(shape, device="meta").stride(), [OVERLAPPING]
        dtype = str(tensor.dtype).removeprefix("torch.")
        record["tensors"][key] = {"dtype": dtype, "shape": shape, "stride": stride, "address": address}
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


def _member(key: str, dtype: torch.dtype) -> str:
    return "contents" if dtype.is_floating_point or key.startswith(POOL) else "numbers"


def _restored(archive: ZipFile, layouts: Mapping[str, Any]) -> dict[str, Tensor]:
    members, tensors = {name: archive.open(name) for name in MEMBERS}, dict[str, Tensor]()
    for key, layout in layouts.items():
        dtype = getattr(torch, layout["dtype"])
        meta = torch.empty_strided(layout["shape"], layout["stride"], dtype=dtype, device="meta")
        size = 0 if key in UNKEPT else distinct(meta).nbytes
        elements = bytearray(members[_member(key, dtype)].read(size))
        if len(elements) < size:  # before memory of this size is allocated
            raise ValueError(f"{key} needs {size} bytes, and the file has {len(elements)}")
        tensors[key] = placed(meta, layout["address"])
        if size:
            once = distinct(tensors[key])
            once.copy_(torch.frombuffer(elements, dtype=dtype).view(once.shape))
    return tensors


def _renumbered(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return (sorted ids of the pages that a call reads, page table in which each id is replaced by its index among them). Both
    are on the CPU, the sorted ids int64. Ids outside the pool are not changed. Cells that the call does not read become 0.
    """
    pool = given["kv_cache"][0] if isinstance(given["kv_cache"], tuple | list) else given["kv_cache"]
    page_size = pool.shape[-3 if given.get("kv_layout") == "NHD" else -2]
    selects, whole = bool(given.get("sparse_mla_top_k")), given["block_tables"]
    in_page = page_size if selects else 1  # a cell names an entry of a page, or a page
    cells = whole.cpu().long().contiguous()
    is_read = torch.ones_like(cells, dtype=torch.bool)
    if not selects:
        is_shared, by_kv_head = given.get("uses_shared_paged_kv_idx", True), given.get("enable_block_sparse_attention")
        if cells.dim() != (2 if is_shared and not by_kv_head else 3):
            raise ValueError(f"block_tables of shape {list(cells.shape)} are no page tables")
        window, q_len = given.get("window_left", -1), max(given.get("q_len_per_req") or 1, given.get("max_q_len") or 0)
        seq_lens, column = given["seq_lens"].cpu().long()[..., None], torch.arange(cells.shape[-1])
        first = (seq_lens - q_len - window).clamp(min=0) // page_size if window >= 0 else 0
        in_request = (column >= first) & (column < -(-seq_lens.clamp(min=0) // page_size))
        is_read &= in_request if is_shared else in_request[:, None]
    ids = cells // in_page
    in_pool = (ids >= 0) & (ids < pool.shape[0])
    pages = ids[is_read & in_pool].unique()
    new = torch.where(is_read, torch.searchsorted(pages, ids) * in_page + cells % in_page, 0)
    renumbered = torch.where(in_pool, new, cells).to(whole.dtype)
    layout = whole if all(whole.stride()) else renumbered  # rows of an expanded table become different
    return pages, placed(layout, whole.data_ptr()).copy_(renumbered)


def _elements(tensor: Tensor, pages: Tensor | None) -> Tensor:
    # Pages are copied a few at a time, because an engine leaves little GPU memory free.
    whole = tensor.detach()
    if pages is None:
        return distinct(whole).to("cpu", copy=True, memory_format=torch.contiguous_format).flatten().view(torch.uint8)
    kept = torch.empty(len(pages), *whole.shape[1:], dtype=whole.dtype)
    at_once = max(1, MOST_COPIED_BYTES // max(whole[:1].nbytes, 1))
    for part, some in zip(kept.split(at_once), pages.split(at_once), strict=True):
        part.copy_(whole[some.to(whole.device)])
    return kept.flatten().view(torch.uint8)
