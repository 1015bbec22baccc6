"""Write calls in FlashInfer's form, for calls that the references cannot be recorded with."""

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lab.recorded.flashinfer_dumps import METADATA


def write_call(folder: Path, function: str, arguments: Mapping[str, Any], returned: tuple[torch.Tensor, ...]) -> Path:
    """Write the only call of a folder; K and V are one tensor each or a pair."""
    path = folder / f"20261126_000000_000_pid1_{function}_call0001"
    path.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            tensors[f"kwarg_{name}"] = value
        elif isinstance(value, tuple | list):
            keys = [f"kwarg_{name}__{place}" for place in range(len(value))]
            tensors |= dict(zip(keys, value, strict=True))
            items = [{"type": "torch.Tensor", "tensor_key": key} for key in keys]
            others[f"kwarg_{name}"] = {"type": type(value).__name__, "items": items, "truncated": False}
        elif isinstance(value, torch.dtype):
            others[f"kwarg_{name}"] = {"type": "torch.dtype", "value": str(value)}
        else:
            others[f"kwarg_{name}"] = value
    torch.save(tensors, path / "inputs.pt")
    names = ["result"] if len(returned) == 1 else ["result_0", "result_1"]
    torch.save(dict(zip(names, returned, strict=True)), path / "outputs.pt")
    (path / METADATA).write_text(
        json.dumps({"function_name": function, "input_metadata": others, "timestamp": "20261126"})
    )
    return folder


def same(read: Any, made: Any, has_strides: bool = True) -> bool:
    """Tell whether two arguments are equal, tensors in dtype and strides too."""
    if isinstance(made, torch.Tensor):
        has_layout = read.dtype == made.dtype and (read.stride() == made.stride() or not has_strides)
        return has_layout and torch.equal(*(each.flatten().view(torch.uint8) for each in (read, made)))
    if isinstance(made, tuple | list):
        return type(read) is type(made) and all(same(*sides, has_strides) for sides in zip(read, made, strict=True))
    return bool(read == made)


def changed_bytes(content: bytes) -> Iterator[bytes]:
    """Yield contents of a file with some bytes changed at random, of which about half are cut off too."""
    draw = random.Random(1)
    for _ in range(40):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 4, 40))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        yield bytes(changed[: draw.choice((len(changed), draw.randrange(len(changed))))])
