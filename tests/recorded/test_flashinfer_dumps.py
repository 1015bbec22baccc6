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

from lab.calls import AttentionCall
from lab.recorded.call import RecordingError
from lab.recorded.case import recorded_cases
from lab.recorded.flashinfer_dumps import METADATA, REPLAYS, listed, read
from lab.references.assertion import assert_close_to_reference
from tests.commands.command import run
from tests.recorded.record_calls import decode_arguments
from tests.recorded.write_calls import changed_bytes


def _same(read: Any, made: Any) -> bool:
    if isinstance(made, torch.Tensor):
        return torch.equal(read, made) and read.stride() == made.stride() and read.dtype == made.dtype
    if isinstance(made, tuple):
        return isinstance(read, tuple) and all(map(_same, read, made))
    return bool(read == made)


@pytest.mark.parametrize("number", [0, 1], ids=["by name", "by position"])
def test_arguments_are_read_as_they_were_given(recorded_once: Path, number: int) -> None:
    call = read(listed(recorded_once)[number].path)
    made = decode_arguments(workspace_buffer=None)
    assert call.function is AttentionCall.DECODE
    assert set(call.given) == set(made)
    assert all(_same(call.given[name], made[name]) for name in made if name != "kv_cache")
    for each, given in zip(call.given["kv_cache"], made["kv_cache"], strict=True):
        assert torch.equal(each, given)
    assert call.arguments()["workspace_buffer"] is None
    assert call.lse is None
    assert "flashinfer" in call.versions
    assert "alignment" in call.lost[0]
    assert_close_to_reference(call.out, **call.arguments())


def test_results_that_were_given_are_not_read_as_inputs(recorded_once: Path) -> None:
    call = read(listed(recorded_once)[2].path)
    arguments = call.arguments()
    assert arguments["out"] is not call.given["out"]
    assert arguments["out"].shape == call.given["out"].shape
    assert arguments["lse"].dtype == torch.float32
    assert arguments["out"].dtype == torch.bfloat16
    assert call.lse is not None
    assert_close_to_reference((call.out, call.lse), **{**arguments, "out": None, "lse": None})


def test_a_dtype_and_an_integer_are_read(recorded_once: Path) -> None:
    call = read(listed(recorded_once)[3].path)
    assert call.given["out_dtype"] == torch.float16
    assert call.given["window_left"] == 3
    assert call.out is not None
    assert call.out.dtype == torch.float16
    assert call.problem().window_left == 3


def test_a_call_that_failed_has_inputs_alone(recorded_once: Path) -> None:
    call = read(listed(recorded_once)[4].path)
    assert call.out is None
    assert call.given["max_seq_len"] == 4
    with pytest.raises(ValueError, match=r"seq_lens\[0\] = 5 exceeds max_seq_len.* = 4"):
        call.problem()


def test_a_function_that_is_no_attention_call_is_refused(recorded_once: Path) -> None:
    assert listed(recorded_once)[5].function == "relu"
    with pytest.raises(
        RecordingError, match="holds a call of relu, and the lab does not read recordings of this function"
    ):
        read(listed(recorded_once)[5].path)


def _as_replays(path: Path, count: int) -> None:
    """Make an eager call's folder look like that of a captured call with replays."""
    (record,) = [json.loads(line) for line in (path / METADATA).read_text().splitlines()[-1:]]
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
        with pytest.raises(RecordingError, match="has no calls itself: `lab record` makes some"):
            recorded_cases(part)
    (calls[2].path / "outputs.pt").unlink()
    for path in (replays[0].path, calls[2].path):
        torch.save({"result": torch.zeros(3, 4, 64)}, path / "outputs.pt")
    assert read(replays[0].path).lse is not None
    assert read(calls[2].path).lse is None


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
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
    "an argument of a later release": (
        lambda path: _edit(path, lambda record: record["input_metadata"].update(kwarg_colour="red")),
        "was recorded with colour, which FlashInfer 0.7.2 does not have",
    ),
    "a value that was not recorded": (
        lambda path: _edit(
            path, lambda record: record["input_metadata"].update(kwarg_o_scale={"type": "FP4Tensor", "repr": "…"})
        ),
        "does not hold the value of o_scale, only that it is FP4Tensor",
    ),
    "a tuple that was cut off": (
        lambda path: _edit(path, lambda record: record["input_metadata"]["kwarg_kv_cache"].update(truncated=True)),
        "does not hold the value of kv_cache, only that it is tuple",
    ),
    "too many arguments": (
        lambda path: _edit(path, lambda record: record["input_metadata"].update(arg_99=1)),
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


def test_a_folder_without_calls_has_none(tmp_path: Path) -> None:
    assert listed(tmp_path) == []


def test_inputs_without_a_record_are_listed(dumps: Path) -> None:
    before = len(listed(dumps))
    (listed(dumps)[1].path / METADATA).unlink()
    assert len(listed(dumps)) == before


def test_arguments_by_position_are_named_without_a_readable_signature(dumps: Path) -> None:
    path = listed(dumps)[1].path
    named = read(path).given.keys()
    _edit(path, lambda record: record.pop("function_signature"))
    assert read(path).given.keys() == named
