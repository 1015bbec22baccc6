"""The judge of an MLA pass: a call that was prepared is judged on other contents than those of its preparation."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import LATENT_CALLS, AttentionCall
from lab.checks import Outcome
from lab.checks.properties import mla_modes
from lab.checks.run.judging import run_case
from lab.ranges import Ranges

SIZES = {"num_qo_heads": 2, "kv_lora_rank": 64}


def kernel_of_one_call(interface: AttentionCall, *kept: str) -> Any:
    """Return a kernel with one function and its prepared form, which keeps the contents of the tensors in `kept`."""
    function: Callable[..., Any] = getattr(references, interface.value)

    def prepare(**arguments: Any) -> Callable[[], Any]:
        return partial(function, **arguments | {name: arguments[name].clone() for name in kept})

    return SimpleNamespace(**{interface.value: function, f"prepare_{interface.value}": prepare})


@pytest.mark.parametrize("interface", LATENT_CALLS)
@pytest.mark.parametrize(("kept", "outcome"), [((), Outcome.RIGHT), (("query",), Outcome.WRONG)])
def test_a_prepared_call_that_keeps_contents_is_wrong(
    interface: AttentionCall, kept: tuple[str, ...], outcome: Outcome
) -> None:
    of_pages = mla_modes.mla_mode_cases(32, (1,), qk_rope_head_dim=16, **SIZES)
    case = next(of_pages if interface is AttentionCall.MLA_DECODE else mla_modes.two_pool_cases(1, **SIZES))
    kernel = kernel_of_one_call(interface, *kept)
    verdict = run_case(kernel, mla_modes.CHECK, case, torch.device("cpu"), Ranges())
    assert verdict.outcome is outcome, verdict
    assert all(each.startswith("the pass, prepared on other contents: ") for each in verdict.wrongs)
    assert bool(kept) is bool(verdict.wrongs)
