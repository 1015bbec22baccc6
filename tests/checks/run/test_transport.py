"""What may come out of a worker's pipe: what the judge sends itself, and no code."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.calls.problem import AttentionCall
from lab.checks.run.transport import Foreign, loads
from lab.checks.run.verdicts import (
    CaseVerdict,
    CheckedResult,
    Judged,
    Outcome,
    TooLate,
    WrongVector,
    credible,
)
from lab.checks.run.workers import Workers
from lab.exit_status import ExitStatus
from lab.loading import LoadError
from lab.ranges import Ranges
from lab.workloads.inputs.expected import SavedTensor

JUDGED = Judged(
    Outcome.WRONG,
    ("the call: 3 vectors are wrong",),
    worst_ratio=2.5,
    judged=1,
    results=(
        CheckedResult("the call", {"kv_len": 3}, True, (({"kv_len": 3}, True),), WrongVector("row 0", (1.0,), (2.0,))),
    ),
    output=SavedTensor.of(torch.arange(6, dtype=torch.bfloat16).view(2, 3)),
)


@pytest.mark.parametrize(
    "sent",
    [
        JUDGED,
        {"a": {1, 2}},
        frozenset("a"),
        LoadError("no"),
        ValueError("x"),
        TooLate(),
        {AttentionCall.DECODE},
        torch.float16,
    ],
)
def test_what_the_judge_sends_arrives(sent: Any) -> None:
    found = loads(pickle.dumps(sent))
    assert type(found) is type(sent)
    assert repr(found) == repr(sent)


def test_an_output_is_what_it_was() -> None:
    found = loads(pickle.dumps(JUDGED)).output.tensor()
    assert torch.equal(found, torch.arange(6, dtype=torch.bfloat16).view(2, 3))
    assert SavedTensor.of(torch.zeros(0, 4)).tensor().shape == (0, 4)


@pytest.mark.parametrize("data", [b"", bytes(8), bytes(1024)])
def test_an_output_without_its_elements_is_no_tensor(data: bytes) -> None:
    # An empty tensor of this shape may lie in memory that held the expected results.
    with pytest.raises(RuntimeError, match="invalid for input"):
        SavedTensor(torch.float64, (2, 4, 8), data).tensor()


class Calls:
    """A pickle that calls a function where it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.all = function, arguments

    def __reduce__(self) -> Any:
        return self.all


@pytest.mark.parametrize(
    "sent",
    [
        Calls(os.system, "exit 1"),
        Calls(eval, "1 + 1"),
        Calls(exec, "raise SystemExit"),
        Calls(getattr, str, "join"),
        Calls(torch.load, "/nowhere"),
        Calls(__import__("lab.loading").loading.load, "os"),
        Calls(__import__, "os"),
        Calls(Workers, "os", torch.device("cpu"), Ranges(), 1.0),
        Calls(KeyboardInterrupt),
        Calls(SystemExit, 0),
    ],
    ids=lambda sent: getattr(sent.all[0], "__name__", "?"),
)
def test_nothing_is_called_but_the_judges_classes(sent: Any) -> None:
    found = loads(pickle.dumps((sent, 3)))
    assert type(found[0]) is Foreign
    assert found[1] == 3
    assert credible(found[0]).outcome is Outcome.DISHONEST


def _named(module: str, name: str) -> bytes:
    """Return the opcodes that put what a module holds under a name on the stack."""
    return b"".join(b"\x8c" + bytes([len(each)]) + each.encode() for each in (module, name)) + b"\x93"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("lab.provenance", "subprocess.Popen"),
        ("lab.checks.run.verdicts", "Any"),
        ("lab.checks.run.workers", "Judged"),  # another module than that which defines the class
        ("lab.checks.run.verdicts", "CaseVerdict"),
        ("pebble.pool.process", "ProcessPool"),
    ],
)
def test_only_named_classes_are_read(module: str, name: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    arguments = pickle.dumps((["touch", str(made)],), 2)[2:-1]
    assert type(loads(b"\x80\x04" + _named(module, name) + arguments + b"R.")) is Foreign
    assert not made.exists()


VERDICTS = "lab.checks.run.verdicts"
RIGHT = _named(VERDICTS, "Outcome") + pickle.dumps("right", 4)[11:-2] + b"\x85R"
FORGED = b"}" + pickle.dumps("outcome", 4)[11:-2] + RIGHT + b"s"
REBUILD = _named("pebble.common.types", "RemoteException.rebuild_exception")


@pytest.mark.parametrize("state", [FORGED, b"N" + FORGED + b"\x86"], ids=["dict", "slots"])
@pytest.mark.parametrize(
    "target",
    [
        _named(VERDICTS, "Judged"),
        _named(VERDICTS, "Outcome"),
        _named(VERDICTS, "TooLate"),
        _named("nowhere", "Foreign"),
        REBUILD,
        RIGHT,
    ],
    ids=["class", "enum", "exception", "foreign", "function", "member"],
)
def test_nothing_that_the_judge_has_is_changed(target: bytes, state: bytes) -> None:
    before = {each: dict(vars(each)) for each in (Judged, Outcome, TooLate, Foreign, Outcome.RIGHT)}
    with pytest.raises(pickle.PicklingError, match="it sets attributes of"):
        loads(b"\x80\x04" + target + state + b"b.")
    assert {each: dict(vars(each)) for each in before} == before


def test_only_an_exception_gets_a_traceback() -> None:
    data = b"\x80\x04" + REBUILD + _named(VERDICTS, "Judged") + pickle.dumps("no", 4)[11:-2] + b"\x86R."
    assert type(loads(data)) is Foreign
    assert not hasattr(Judged, "traceback")


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"no pickle", pickle.dumps(JUDGED)[:-9]])
def test_damaged_data_ends_the_pool_and_nothing_else(data: bytes) -> None:
    with pytest.raises(pickle.PicklingError, match="a worker sent what cannot be read: "):
        loads(data)


def test_a_verdict_that_contradicts_itself_is_dishonest() -> None:
    assert credible(JUDGED) is JUDGED
    for ratio in (1.01, float("nan"), float("inf")):
        found = credible(Judged(Outcome.RIGHT, worst_ratio=ratio, judged=1))
        assert found.outcome is Outcome.DISHONEST
        assert "times its bound" in found.wrongs[0]
    for ratio in (1.0, 1):
        assert credible(Judged(Outcome.RIGHT, worst_ratio=ratio, judged=1)).outcome is Outcome.RIGHT


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": Outcome.KNOWN},
        {"outcome": "right"},
        {"outcome": None},
        {"worst_ratio": "0"},
        {"judged": "1"},
        {"by_lab": None},
        {"wrongs": None},
        {"declines": (1,)},
        {"remarks": ["a list"]},
        {"results": ("no result",)},
        {"output": "no tensor"},
        {"differences": (WrongVector("row 0", (), ()),)},
    ],
    ids=repr,
)
def test_a_verdict_that_no_worker_sends_is_dishonest(fields: dict[str, Any]) -> None:
    sent = Judged(Outcome.RIGHT, judged=1)
    vars(sent).update(fields)  # as unpickling does
    for forged in (sent, loads(pickle.dumps(sent))):
        assert credible(forged).outcome is Outcome.DISHONEST
        assert "what is no verdict" in credible(forged).wrongs[0]
    del vars(sent)[next(iter(fields))]
    assert credible(sent).outcome is Outcome.DISHONEST


def test_a_case_that_crashed_without_a_word_has_exit_status_1() -> None:
    case = CaseVerdict("kernel", "K1", AttentionCall.DECODE, 1, "cpu", Judged(Outcome.FAILED))
    assert case.exit_status is ExitStatus.WRONG
