"""The draft steps' metadata, dead work and all: the ragged lists, each step's metadata, the fused kernel."""

from typing import Any

import pytest
import torch

from lab.timing import Ceilings, Method
from studies.draft_scenarios import CHOICES, DraftScenario, draft_scenario
from studies.draft_work import POISON, draft_work, time_draft

# Every kind and choice, small enough for the interpreter, around a page's edge.
SMALL = [
    *(f"kv_indices/{schedule}/3x63" for schedule in CHOICES["kv_indices"][0]),
    *(
        f"draft_steps/{attention}/{plan}/3x63{form}"
        for attention in CHOICES["draft_steps"][0]
        for plan in CHOICES["draft_steps"][1]
        for form in ("", "/eager")
    ),
    *(f"forward_metadata/{passes}/3x63" for passes in CHOICES["forward_metadata"][0]),
]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("benchmark")
def test_draft_is_right(name: str) -> None:
    """What is timed is written right twice over, and the check notices when nothing is written."""
    work = draft_work(draft_scenario(name), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert work.check is not None
    call = work.call()
    for _ in range(2):
        call()
        work.check(work.arguments)
    with pytest.raises(AssertionError, match="wrong"):
        work.check(work.arguments)


@pytest.mark.parametrize("form", ["", "/eager"])
def test_the_lists_of_the_common_template_are_wiped_too(form: str) -> None:
    """Or a later call that writes metadata and no lists would pass."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = draft_work(draft_scenario(f"draft_steps/mha/common_template/3x63{form}"), device)
    assert work.check is not None
    work.call()()
    work.check(work.arguments)
    assert work.arguments["written"]
    for step in work.arguments["written"]:
        assert (step.kv_indices == POISON).all()
        assert (step.kv_indptr[1:] == POISON).all()


def test_draft_timed(
    scenario_name: str, draft: DraftScenario, warm_method: Method, ceilings: Ceilings, gpu_benchmark: Any
) -> None:
    time, facts = time_draft(draft, warm_method)
    gpu_benchmark(time, ceilings, {"scenario": scenario_name} | facts)
