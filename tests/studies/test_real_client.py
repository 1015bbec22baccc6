"""An engine that nobody here wrote, if it is installed: its tokens with the references in place of its own attention, and a
wrong kernel in the references' place, followed from the engine to a program that shows the error alone.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lab.recorded import recorded_cases
from studies.pictures.real_client import calls_figure
from studies.real_client import RealClient, verdict
from studies.real_engine import CONTEXT, DECODE
from tests.commands.command import run

ROOT = Path(__file__).parents[2]

needs_engine = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "psutil")),
    reason="transformers and psutil are not installed: pip install '.[engine]'",
)


LINE = "experiments real-client --requests 4 --longest 201 --new-tokens 2 --shadow 1 --wrong corpus:everything_biased"


@needs_engine
def test_tokens_are_the_engines_own_and_a_wrong_kernel_is_caught_in_shadow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "real_client.json"
    assert run(f"{LINE} --recordings {tmp_path / 'calls'} --out {out}") == 0
    recorded = json.loads(out.read_text())
    eager, sdpa, alone, in_shadow, wrong = recorded["served"]
    assert [row["same"] for row in (eager, sdpa, alone, in_shadow)] == [4] * 4
    assert (eager["calls"], alone["calls"]) == (0, in_shadow["calls"])
    assert alone["attention"] == in_shadow["attention"] == "lab.references"
    assert in_shadow["judged"] == in_shadow["calls"] >= 4
    assert (in_shadow["wrong"], in_shadow["kept"]) == (0, 0)
    assert wrong["judged"] == wrong["wrong"] == wrong["kept"] == wrong["calls"]
    assert {call["verdict"] for call in recorded["calls"] if call["attention"] == wrong["attention"]} == {"wrong"}
    calls = tmp_path / "calls" / "corpus.everything_biased"
    assert len(recorded_cases(calls)) == wrong["wrong"]
    assert recorded["idle_recorder"]["without_us"] < recorded["idle_recorder"]["with_us"] < 50
    assert calls_figure(recorded["calls"], "calls")
    assert "lab.references" in capsys.readouterr().out
    line = f"recorded shrink {calls}#1 --implementation corpus:everything_biased --out {tmp_path / 'repro'}"
    assert run(line) == 0
    assert status_alone(tmp_path, "corpus:everything_biased") == 1
    assert status_alone(tmp_path, "lab.references") == 0


def status_alone(folder: Path, implementation: str) -> int:
    """Run the small program on the CPU, with an implementation as the installed FlashInfer; return its exit status."""
    package = folder / "flashinfer"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("__version__ = '0'")
    for module in ("decode", "prefill"):
        (package / f"{module}.py").write_text(
            "from lab.loading import load\n"
            f"globals().update({{name: getattr(load({implementation!r}), name) for name in {[DECODE, CONTEXT]}}})"
        )
    command = [sys.executable, str(folder / "repro" / "repro.py"), "cpu"]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}, check=False).returncode


def test_other_tokens_come_with_the_gap_of_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    study = RealClient(requests=2)
    logits = {3: torch.tensor([0.0, 9.0, 8.5, 3.0])}
    engine = SimpleNamespace(
        device=torch.device("cpu"), dtype=torch.bfloat16, logits=lambda tokens: logits[len(tokens)]
    )
    for name, value in (("_engine", engine), ("_prompts", [[7], [7, 7]]), ("_expected", [[1, 2, 3], [3, 1, 0]])):
        vars(study)[name] = value
    assert list(study._differing([[1, 2, 3], [3, 2, 1]])) == [
        {"request": 1, "prompt_tokens": 2, "step": 1, "tokens": [1, 2], "gap": 0.5, "distance": 2**-4}
    ]


def test_every_nth_call_is_judged_with_each_implementation_once_before() -> None:
    study = RealClient(implementations=("one", "two"), wrong="three", shadow=5)
    (part,) = study.parts
    assert [(each.name, each.shadow) for each in part.points] == [
        ("paged|eager", 0),
        ("paged|sdpa", 0),
        ("one", 0),
        ("two", 0),
        ("one", 5),
        ("three", 5),
    ]
    assert study.modules == ("one", "two", "three")


def test_a_call_is_wrong_right_or_not_judged() -> None:
    assert [verdict(number, [3, 6], {6}) for number in range(1, 8)] == ["", "", "right", "", "", "wrong", ""]


def test_without_the_engine_the_command_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else object())
    assert run(f"experiments real-client --out {tmp_path / 'x.json'}") == 2
    assert "lab experiments real-client needs transformers" in (said := capsys.readouterr().err)
    assert "'.[engine]'" in said
    assert not (tmp_path / "x.json").exists()
