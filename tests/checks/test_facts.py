"""Facts of cases and calls, and the results that a run notes with them."""

from dataclasses import replace

import torch

from lab import references
from lab.checks import AttentionCase, ForwardCase, Interface
from lab.checks.case_run import CaseRun
from lab.checks.facts import facts_of_case
from lab.checks.properties import checks
from lab.checks.properties.check import Level
from lab.checks.run.workers import run_trial
from lab.metadata import ForwardMode
from lab.workloads.inputs.attention import truth_of_call
from tests.checks.small import SMALL

CASE = AttentionCase(Interface.DECODE, (20, 0, 32), (2, 2, 2), num_kv_heads=1, group=3, window_left=5)
CPU = torch.device("cpu")


def test_a_case_and_its_plain_call_have_the_same_facts() -> None:
    run = CaseRun(references, CASE, CPU)
    run.call(run.build())
    of_case, of_call = facts_of_case(CASE), run.called
    assert of_case.of_requests == of_call.of_requests
    shared = of_case.facts.keys() & of_call.facts.keys()
    assert {"window_left", "group", "head_dim", "requests", "contents", "function", "dtype"} <= shared
    assert {name: of_case.facts[name] for name in shared} == {name: of_call.facts[name] for name in shared}


def test_each_request_has_its_own_facts() -> None:
    partly_filled, empty, full = facts_of_case(CASE).of_requests
    assert partly_filled["kv_len % page_size > 0"]
    assert "kv_len % page_size > 0" not in full
    assert empty["kv_len == 0"]
    assert empty["kv_len < q_len"]


def test_a_result_says_which_requests_are_wrong_and_shows_one_vector() -> None:
    run = CaseRun(references, CASE, CPU)
    inputs = run.build()
    result = run.call(inputs, bmm2_scale=torch.tensor([1.0]))
    result.out[5, 1] *= 2
    run.hold("this", result, truth_of_call(inputs))
    (noted,) = run.results
    assert noted.wrong
    assert noted.facts["held"] == "output"
    assert noted.facts["bmm2_scale is a tensor"]
    assert [wrong for _, wrong in noted.requests] == [False, False, True]
    assert noted.example is not None
    assert noted.example.where == "row 5 (request 2), head 1"
    assert noted.example.got[0] == result.out[5, 1, 0].item()


def test_a_call_knows_what_changed_since_an_earlier_one() -> None:
    run = CaseRun(references, replace(CASE, window_left=-1), CPU)
    inputs = run.build()
    arguments = inputs.arguments()
    run.run(Interface.DECODE, arguments)
    inputs.seq_lens[2] = 30
    run.run(Interface.DECODE, arguments | {"bmm1_scale": 0.5})
    facts = run.called.facts
    assert facts["calls before"] == 1
    assert facts["seq_lens was written since an earlier call"]
    assert facts["another bmm1_scale than the first call of these shapes"]
    assert "another bmm2_scale than the first call of these shapes" not in facts


def test_every_check_notes_results_with_facts() -> None:
    for check in checks():
        for interface in check.interfaces:
            case = next(iter(check.cases(interface, SMALL, Level.SMOKE)), None)
            if case is not None and check.key[0] in "LM":
                judged = run_trial(references, check, case, CPU, SMALL)
                assert all(result.facts["held"] for result in judged.results)
    assert facts_of_case(ForwardCase(ForwardMode.DECODE, "tiny", (3,), (1,))).facts["mode"] == "decode"
