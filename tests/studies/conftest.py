"""A GPU that is not there."""

import pytest
import torch

from studies import recording, variants
from tests.studies.simulated import CEILINGS


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment measures: what it measures is the test's to simulate."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(recording, "environment", lambda: {"gpu": "simulated"})
    monkeypatch.setattr(variants, "measure_ceilings", lambda device: CEILINGS)
