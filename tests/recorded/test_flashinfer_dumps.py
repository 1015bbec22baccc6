"""Calls that FlashInfer recorded are read as they were made, and what cannot be read is refused in a sentence."""

import contextlib
import io
import json
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.recorded.call import RecordingError
from lab.recorded.case import recorded_cases
from lab.recorded.flashinfer_dumps import METADATA, REPLAYS, listed, read
from tests.commands.command import run
from tests.recorded.record_calls import OWN
from tests.recorded.write_calls import changed_bytes, same


def test_calls_are_read_as_the_labs_own_recorder_has_them(recorded_once: Path) -> None:
    """Named and positional arguments, a given output and LSE, an output of another dtype, and a call that failed."""
    dumped, own = recorded_cases(recorded_once), recorded_cases(recorded_once.with_name(OWN))
    for theirs, ours in zip((case.read() for case in dumped), (case.read() for case in own), strict=True):
        assert (theirs.function, theirs.given.keys()) == (ours.function, ours.given.keys())
        cut = ("kv_cache", "block_tables", "out", "lse")  # to the pages that are read, or without contents
        assert all(same(theirs.given[name], ours.given[name]) for name in theirs.given if name not in cut)
        for name in cut[2:]:
            given = (each.arguments().get(name) for each in (theirs, ours))
            assert same(*((each.shape, each.stride(), each.dtype) if each is not None else None for each in given))
            assert same(getattr(theirs, name), getattr(ours, name))
        pages = list(ours.pages or ())
        for whole, kept in zip(theirs.given["kv_cache"], ours.given["kv_cache"], strict=True):
            assert torch.equal(whole[pages], kept)
        assert theirs.versions["flashinfer"] == ours.versions["flashinfer"]
        assert "alignment" in theirs.lost[0]


def _as_replays(path: Path, count: int) -> None:
    record = json.loads((path / METADATA).read_text().splitlines()[-1])
    for replay in range(1, count + 1):
        snapshot = path / REPLAYS / f"flush_{replay:04d}"
        snapshot.mkdir(parents=True)
        for each in path.glob("*.pt"):
            shutil.copy(each, snapshot)
        (snapshot / METADATA).write_text(json.dumps(record | {"graph_capture_flush_index": replay}))


def test_a_captured_call_is_its_replays_with_the_lse_that_it_wrote(dumps: Path) -> None:
    calls = listed(dumps)
    _as_replays(calls[2].path, 11)
    replays = listed(dumps)[2:13]
    assert [each.replay for each in replays] == [*range(1, 12)]
    assert {each.path.parents[1] for each in replays} == {calls[2].path}
    assert len(listed(dumps)) == 5 + 11
    (third,) = recorded_cases(f"{dumps}#4")
    assert (third.replay, third.address) == (2, f"{dumps}#4")
    for part in (calls[2].path, calls[2].path / REPLAYS, replays[0].path):
        with pytest.raises(RecordingError, match="has no recorded calls; subfolders are not searched"):
            recorded_cases(part)
    (calls[2].path / "outputs.pt").unlink()
    for path in (replays[0].path, calls[2].path):
        torch.save({"result": torch.zeros(3, 4, 64)}, path / "outputs.pt")
    assert read(replays[0].path).lse is not None
    assert read(calls[2].path).lse is None


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    lines = (path / METADATA).read_text().splitlines()
    record = json.loads(lines[-1])
    change(record)
    (path / METADATA).write_text("\n".join([*lines[:-1], json.dumps(record)]))


class _Runs:
    """Its pickle calls a function where it is read by one that does not refuse code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return warnings.warn, ("code of the file was run", ResourceWarning)


def _pickled(content: Any) -> bytes:
    held = io.BytesIO()
    torch.save(content, held, pickle_module=pickle)
    return held.getvalue()


def _pipe(name: str, call: Path) -> None:
    (call / name).unlink()
    os.mkfifo(call / name)


def _device(name: str, call: Path) -> None:
    (call / name).unlink()
    (call / name).symlink_to("/dev/zero")


def _edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda path: _edit(path, change)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no record": (lambda path: (path / METADATA).write_text(""), "is no record of a FlashInfer call"),
    "a record that is missing": (lambda path: (path / METADATA).unlink(), "cannot be read"),
    "a record of lists in lists": (lambda path: (path / METADATA).write_text("[" * 100_000), "is damaged"),
    "a record that is no text": (lambda path: (path / METADATA).write_bytes(b"\xff\xfe\x00"), "is damaged"),
    **{
        f"{name} that is {what}": (partial(replace_by, name), f"{name} cannot be read: it is .* a pipe or a device")
        for name in (METADATA, "inputs.pt", "outputs.pt")
        for what, replace_by in {"a pipe": _pipe, "a device without end": _device}.items()
    },
    "no inputs": (lambda path: (path / "inputs.pt").unlink(), "has no inputs"),
    "half the inputs": (
        lambda path: (path / "inputs.pt").write_bytes((path / "inputs.pt").read_bytes()[:5000]),
        "inputs.pt is damaged",
    ),
    "inputs with code": (
        lambda path: (path / "inputs.pt").write_bytes(_pickled({"arg_0": _Runs()})),
        "inputs.pt has something else than tensors and plain values, and is not read$",
    ),
    "inputs that are a list": (lambda path: torch.save([1], path / "inputs.pt"), "does not hold tensors by name"),
    "another function": (
        _edited(lambda record: record.update(function_name="relu")),
        "holds a call of relu, and the lab does not read recordings of this function",
    ),
    "an argument of a later release": (
        _edited(lambda record: record["input_metadata"].update(kwarg_colour="red")),
        "was recorded with colour, which FlashInfer 0.7.2 does not have",
    ),
    "a value that was not recorded": (
        _edited(lambda record: record["input_metadata"].update(kwarg_o_scale={"type": "FP4Tensor", "repr": "…"})),
        "does not hold the value of o_scale, only that it is FP4Tensor",
    ),
    "a tuple that was cut off": (
        _edited(lambda record: record["input_metadata"]["kwarg_kv_cache"].update(truncated=True)),
        "does not hold the value of kv_cache, only that it is tuple",
    ),
    "too many arguments": (
        _edited(lambda record: record["input_metadata"].update(arg_99=1)),
        "has arg_99, but the recorded signature has",
    ),
}


@pytest.mark.filterwarnings("error:code of the file was run")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_recording_is_refused_in_one_sentence(dumps: Path, damage: str) -> None:
    call = listed(dumps)[0]
    change, sentence = DAMAGES[damage]
    change(call.path)
    with pytest.raises(RecordingError, match=sentence) as error:
        read(call.path)
    assert "\n" not in str(error.value)
    assert len(listed(dumps)) == 6  # the others are still there


@pytest.mark.parametrize("name", [METADATA, "inputs.pt", "outputs.pt"])
def test_changed_bytes_are_read_or_refused(dumps: Path, name: str) -> None:
    call = listed(dumps)[0]
    path = call.path / name
    for changed in changed_bytes(path.read_bytes()):
        path.write_bytes(changed)
        with contextlib.suppress(RecordingError):
            read(call.path)


class _SafetensorError(Exception):
    """As the package's, which is derived from Exception alone."""


def _load_nothing(_: Path) -> None:
    raise _SafetensorError("invalid header")


@pytest.mark.parametrize("is_installed", [False, True])
def test_safetensors_that_cannot_be_read_are_a_sentence(
    dumps: Path, is_installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package is not installed, or it refuses the file."""
    call = listed(dumps)[0].path
    (call / "inputs.pt").rename(call / "inputs.safetensors")
    if is_installed:
        whole = SimpleNamespace(SafetensorError=_SafetensorError, torch=SimpleNamespace(load_file=_load_nothing))
        monkeypatch.setitem(sys.modules, "safetensors", whole)
        monkeypatch.setitem(sys.modules, "safetensors.torch", whole.torch)
        monkeypatch.setattr("lab.recorded.flashinfer_dumps.require", lambda *_: None)
        sentence = "inputs.safetensors is damaged: ValueError: invalid header"
    else:
        monkeypatch.setattr("lab.extras.importlib.util.find_spec", lambda _: None)
        sentence = "inputs.safetensors needs safetensors, which is not installed: pip install safetensors"
    assert run(["recorded", "shrink", f"{dumps}#1", "--from-outputs"]) == 2
    assert capsys.readouterr().err.endswith(f"{sentence}\n")


def test_arguments_by_position_are_named_without_a_readable_signature(dumps: Path) -> None:
    path = listed(dumps)[1].path
    named = read(path).given.keys()
    _edit(path, lambda record: record.pop("function_signature"))
    assert read(path).given.keys() == named
