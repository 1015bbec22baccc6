"""Read the calls that FlashInfer itself records with `FLASHINFER_LOGLEVEL=10` (`flashinfer/api_logging.py` of 0.7.2).

Each call is a folder. The last line of its `metadata.jsonl` is the record, in which `input_metadata` has the arguments that are
not tensors. The files `inputs` and `outputs` have the tensors, by keys such as `arg_0` or `kwarg_kv_cache__0`. A call in a CUDA
graph also has a folder `graph_flushes`, with a folder of the same files for each replay.
"""

import ast
import inspect
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from lab.calls import CALL_TYPES
from lab.extras import require
from lab.recorded.call import Listed, RecordedCall, RecordingError, decoded, reading

METADATA = "metadata.jsonl"
REPLAYS = "graph_flushes"
LOST = {
    "torch": "FlashInfer copies a tensor to an address of its own, so that offsets and alignment are lost",
    "safetensors": "FlashInfer makes tensors contiguous for safetensors, so that strides, offsets and alignment are lost",
}
_ARGUMENT = re.compile(r"(arg_(?P<index>\d{1,9})|kwarg_(?P<name>\w+?))(__\d+)*", re.ASCII)


def read(path: Path) -> RecordedCall:
    """Read the recorded call, or the recorded replay, in a folder. Raises RecordingError if the lab cannot read it."""
    record = _last_record(path)
    function = RecordedCall.function_of(path, record["function_name"])
    inputs, outputs = _tensors(path, "inputs"), _tensors(path, "outputs")
    if inputs is None:
        raise RecordingError(f"{path} has no inputs: the call was captured and never replayed, or the recording ended")
    try:
        definition = ast.parse(f"def call{record.get('function_signature')}: ...")
        names = [each.arg for each in ast.walk(definition) if isinstance(each, ast.arg)]
    except (SyntaxError, ValueError, RecursionError):  # some defaults are no Python
        names = list(inspect.signature(CALL_TYPES[function]).parameters)
    given, outputs = dict[str, Any](), outputs or {}
    # `input_metadata` shows how tensors are nested in tuples, so it overrides `inputs`.
    for key, value in (*inputs.items(), *record["input_metadata"].items()):
        if (match := _ARGUMENT.fullmatch(key)) is None:
            continue
        if match["index"] and int(match["index"]) >= len(names):
            raise RecordingError(f"{path} has {key}, but the recorded signature has {len(names)} parameters")
        name = names[int(match["index"])] if match["index"] else match["name"]
        given[name] = decoded(path, name, value, inputs)
    lse = outputs.get("result_1")
    if outputs and lse is None and path.parent.name == REPLAYS:
        lse = given.get("lse")  # FlashInfer copies arguments after a replay, but before an eager call
    versions = {str(name): str(version) for name, version in record["versions"].items()}
    lost = (LOST["safetensors" if record.get("tensor_format") == "safetensors" else "torch"],)
    return RecordedCall(function, given, outputs.get("result", outputs.get("result_0")), lse, versions, lost)


def listed(folder: Path) -> list[Listed]:
    """List the calls in a folder in the order of time. A call that was captured in a CUDA graph is replaced by its replays."""
    found, calls = list[Listed](), [] if folder.name == REPLAYS else _folders_of_calls(folder)
    for path in chain.from_iterable(_folders_of_calls(call / REPLAYS) or (call,) for call in calls):
        try:
            record = _last_record(path)
        except RecordingError:
            found.append(Listed(path, ""))
            continue
        replay, time = record.get("graph_capture_flush_index"), str(record.get("timestamp", ""))
        found.append(Listed(path, record["function_name"], time, replay if isinstance(replay, int) else 0))
    return found


def _folders_of_calls(folder: Path) -> list[Path]:
    # A folder without a record is a call too, about which `read` raises an error.
    return sorted({path.parent for name in (METADATA, "inputs.*") for path in folder.glob(f"*/{name}")})


def _last_record(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    with reading(path) as regular:
        lines = [line for line in regular.read_text(encoding="utf-8").splitlines() if line.strip()]
        record = json.loads(lines[-1]) if lines else None
    if not isinstance(record, dict) or not isinstance(record.get("function_name"), str):
        raise RecordingError(f"{path} is no record of a FlashInfer call: its last line has no function_name")
    parts = {name: record.get(name) for name in ("versions", "input_metadata")}
    return record | {name: part if isinstance(part, dict) else {} for name, part in parts.items()}


def _tensors(folder: Path, kind: str) -> dict[str, torch.Tensor] | None:
    path = next((path for end in (".pt", ".safetensors") if (path := folder / f"{kind}{end}").exists()), None)
    if path is None:
        return None
    with reading(path) as regular:
        if path.suffix == ".pt":
            tensors = torch.load(regular, "cpu", weights_only=True)
        else:
            try:
                require(f"reading {path}", "safetensors")
                import safetensors.torch
            except ModuleNotFoundError as error:
                raise RecordingError(str(error)) from error
            try:
                tensors = safetensors.torch.load_file(regular)
            except safetensors.SafetensorError as error:
                raise ValueError(str(error)) from error
    if not isinstance(tensors, dict) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
        raise RecordingError(f"{path} does not hold tensors by name")
    return tensors
