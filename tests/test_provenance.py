"""What a run records of its machine."""

import json

import pytest
import torch

from lab.provenance import environment


def test_the_environment_is_json_and_names_versions() -> None:
    facts = json.loads(json.dumps(environment()))
    assert facts["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert ("gpu" in facts) == torch.cuda.is_available()


def test_the_commit_is_the_labs_own_wherever_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: str) -> None:
    here = environment()["commit"]
    monkeypatch.chdir(tmp_path)
    assert environment()["commit"] == here


def test_a_lab_without_git_takes_its_commit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.provenance.output_of", lambda command: "")
    monkeypatch.setenv("LAB_COMMIT", "0123456789ab")
    assert environment()["commit"] == "0123456789ab"
