"""Find an argument that a kernel accepts and ignores, or that has another effect than the documented one.

A test with default values does not show that an argument works: scales of 1, windows wider than every request, equal K and V
scales. Here every optional argument gets a value that must change the output, and float64 arithmetic gives the expected output.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.properties.check import WITHOUT_RANKS, Check, Scope
from lab.workloads.attention_case import AttentionCase, Contents
from lab.workloads.inputs.attention import AttentionInputs, running_sum
from lab.workloads.inputs.expected import truth_of_requests
from lab.workloads.inputs.masks import draft_masks

WINDOW = 20  # window_left: short enough to hide keys of every request, and with many rows also tokens of a draft
FAR = 64.0  # factor of a row's logits: exp2 of the difference underflows, and an e4m3 query does not overflow

Change = tuple[dict[str, Any], dict[str, Any]]  # changed arguments, and the changed `Rules` of the expected result


def _cases(scope: Scope) -> Iterator[AttentionCase]:
    for case in scope.balanced(6, 12, seed=13):
        # Needles make every limit visible, and every request is longer than a window of 20.
        kv_lens = tuple(max(kv_len, 40 + request) for request, kv_len in enumerate(case.kv_lens))
        yield replace(case, kv_lens=kv_lens, window_left=-1, sinks=False, contents=Contents.NEEDLES)
    if scope.interface is AttentionCall.DECODE:
        # Requests with fewer keys than rows and a mask are separate cases, because some kernels refuse them.
        rows = scope.ranges.masked_rows
        for case in scope.balanced(1, 4, seed=21):
            q_len = rows[case.seed % len(rows)]
            plain = replace(case, window_left=-1, sinks=False, contents=Contents.NEEDLES)
            yield replace(plain, kv_lens=(q_len - 1, 1, q_len + 30), q_lens=(q_len,) * 3)


def _judge(run: CaseRun) -> None:
    interface = run.case.interface
    if interface is AttentionCall.DECODE and min(run.case.kv_lens) < run.case.q_lens[0]:
        _masks(run, run.case)
        return
    inputs = run.build()
    truth = inputs.truth()
    run.expect_call("nothing changed", inputs, truth)
    query = inputs.query.float()
    query[::2] *= FAR  # so that a kernel needs a softmax maximum for each row
    uneven = replace(inputs, query=query.to(inputs.query.dtype))
    run.expect_call("rows whose logits are far apart", uneven, uneven.truth())
    for name, (changes, rules) in _probes(run, inputs).items():
        result = run.vary(name, inputs, inputs.truth(**rules) if rules else truth, **changes)
        if result is not None and name == "lse" and result.lse is None:
            run.wrong("return_lse=True returned no LSE")
        if result is not None and result.out.dtype != changes.get("out_dtype", result.out.dtype):
            run.wrong(f"out_dtype={changes['out_dtype']} gave {result.out.dtype}")
    if interface is AttentionCall.CONTEXT:
        _request_without_rows(run, inputs)
    elif inputs.selected is None:  # otherwise each row selects entries of its own
        _ragged(run, inputs)
    if run.case.is_mla:
        _lse_in_base_e(run, inputs, {"return_lse_base": "basee"})
        _lse_in_base_e(run, inputs, {"backend": "cute-dsl"})  # without return_lse_base this backend alone uses base e
        out = inputs.new_out(torch.float16)  # MLA has no out_dtype
        result = run.vary("a float16 out", inputs, out=out)
        if result is not None:
            of_half = inputs.truth(out_dtype=torch.float16)
            run.expect_close("a float16 out", result._replace(out=out.flatten(0, 1)), of_half)
    else:
        run.vary("uses_shared_paged_kv_idx=False", inputs.with_separate_tables(), truth)
    if interface is AttentionCall.DECODE:
        rows = run.ranges.masked_rows
        q_len = rows[run.case.seed % len(rows)]
        # The first request has no keys before its draft.
        kv_lens = (q_len, *(max(kv_len, q_len + 3) for kv_len in run.case.kv_lens[1:]))
        _masks(run, replace(run.case, kv_lens=kv_lens, q_lens=(q_len,) * len(kv_lens)))


def _probes(run: CaseRun, inputs: AttentionInputs) -> dict[str, Change]:
    def both(**changes: Any) -> Change:
        return changes, changes

    def on_device(scale: float) -> Tensor:
        return torch.tensor([scale], dtype=torch.float32, device=inputs.query.device)

    # 0.9 has many mantissa bits, so that a rounded scale gives a wrong result.
    scale, v_scale = 0.75 * inputs.bmm1_scale, 0.9 * inputs.bmm2_scale
    sinks = {"sinks": _unequal_sinks(inputs)}
    probes: dict[str, Change] = {
        "bmm1_scale": both(bmm1_scale=scale),
        "bmm1_scale below 0": both(bmm1_scale=scale_below_0(inputs)),
        "bmm1_scale of 0": both(bmm1_scale=0.0),  # all visible keys weigh the same
        "bmm1_scale as a tensor": both(bmm1_scale=on_device(scale)),
        "bmm2_scale": both(bmm2_scale=v_scale),
        "bmm2_scale as a tensor": both(bmm2_scale=on_device(v_scale)),
        "bmm2_scale below 0": both(bmm2_scale=-v_scale),
        "seq_lens as uint32": ({"seq_lens": inputs.seq_lens.to(torch.uint32)}, {}),  # FlashInfer documents it too
        "lse": ({"return_lse": True}, {}),
    }
    if not inputs.case.is_mla:
        probes |= {
            "out_dtype": both(out_dtype=torch.float16 if inputs.case.dtype == torch.bfloat16 else torch.bfloat16),
            # Most elements exceed the largest e4m3 number. They must saturate to it and not become NaN.
            "an e4m3 output of large values": both(out_dtype=E4M3, bmm2_scale=inputs.bmm2_scale * 4000.0),
        }
        if True in run.ranges.windows:
            probes |= {"window_left": both(window_left=WINDOW), "window_left=0": both(window_left=0)}
    if True in run.ranges.sinks:
        probes["sinks"] = both(**sinks)
        if inputs.case.is_mla:  # the MLA function's signature says a list of sinks, and its kernels take a tensor
            probes["sinks in a list"] = {"sinks": [sinks["sinks"]]}, sinks
        probes["lse of sinks"] = sinks | {"return_lse": True}, sinks
    if inputs.interface is AttentionCall.CONTEXT:
        probes["causal"] = both(causal=False)
    if inputs.interface is AttentionCall.DECODE:
        log2 = {"bmm1_scale_log2": on_device(scale) * math.log2(math.e)}
        probes["bmm1_scale_log2"] = log2, {"bmm1_scale": on_device(scale)}
    return probes


def scale_below_0(inputs: AttentionInputs) -> float:
    """Return a negative bmm1_scale. With it, exp overflows in a kernel that subtracts the logit of the largest product q·k
    instead of the largest logit. The call must have no sinks, because sinks would outweigh all keys.
    """
    # If Q is rounded to e4m3, a scale of -25 could give another key the largest weight: plain torch with this rounding exceeds
    # the error bound in 11 of 12 cases. With -8, its error is at most 0.8 of the bound.
    return (-8.0 if inputs.case.arithmetic == E4M3 else -25.0) * inputs.bmm1_scale


def _sinks_and_window(run: CaseRun, inputs: AttentionInputs) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    if True in run.ranges.sinks:
        found[" with sinks"] = {"sinks": _unequal_sinks(inputs)}
    if True in run.ranges.windows and not run.case.is_mla:
        found[" within a window"] = {"window_left": WINDOW}
    return found


def _ragged(run: CaseRun, inputs: AttentionInputs) -> None:
    case = run.case
    q_lens = tuple(1 + (request * 2 + case.seed) % 5 for request in range(len(case.kv_lens)))
    query = torch.cat([inputs.query] * 8)[: sum(q_lens)]
    given: dict[str, Any] = {"max_q_len": max(q_lens), "cum_seq_lens_q": running_sum(q_lens, run.device)}
    lse: dict[str, Any] = {"return_lse": True}
    if case.is_mla:
        lse |= {"return_lse_base": "base2"}
    else:
        given |= {"q_len_per_req": None}
    for name, changes in {"": {}, **_sinks_and_window(run, inputs)}.items():
        truth = truth_of_requests(
            query, list(inputs.histories), list(q_lens), inputs.rules(**changes), seen=inputs.seen
        )
        for what, arguments in ((f"cum_seq_lens_q{name}", given), (f"cum_seq_lens_q{name}, the LSE", given | lse)):
            run.vary(what, inputs, truth, query=query, **arguments, **changes)


def _request_without_rows(run: CaseRun, inputs: AttentionInputs) -> None:
    case = run.case
    first = case.q_lens[0]
    q_lens = (first, 0, *case.q_lens[2:])
    query = torch.cat((inputs.query[:first], inputs.query[first + case.q_lens[1] :]))
    truth = truth_of_requests(query, list(inputs.histories), list(q_lens), inputs.rules())
    offsets = running_sum(q_lens, run.device)
    run.vary("a request without rows", inputs, truth, query=query, cum_seq_lens_q=offsets)


def _lse_in_base_e(run: CaseRun, inputs: AttentionInputs, changes: dict[str, Any]) -> None:
    what, truth = ", ".join(f"{name}={value!r}" for name, value in changes.items()), inputs.truth()
    result = run.vary(what, inputs, return_lse=True, **changes)
    if result is None:
        return
    if result.lse is None:
        run.wrong(f"{what} returned no LSE")
        return
    run.expect_close(what, result._replace(lse=result.lse / math.log(2)), truth)
    given = torch.full_like(result.lse, math.nan)
    what += " and lse"
    result = run.vary(what, inputs, return_lse=True, lse=given, **changes)
    if result is not None:
        run.expect_close(what, result._replace(lse=given.view(-1, given.shape[-1]) / math.log(2)), truth)


def _masks(run: CaseRun, case: AttentionCase) -> None:
    inputs, masks, rows = run.build(case), draft_masks(case), f"of {case.q_lens[0]} rows"
    run.vary(f"no mask {rows}", inputs, inputs.truth())
    calls = [(f"{name} {rows}", shown, dict[str, Any]()) for name, shown in masks.items()]
    more = {" and the LSE": {"return_lse": True}, **_sinks_and_window(run, inputs)}
    calls += [(f"tree mask {rows}{name}", masks["tree mask"], changes) for name, changes in more.items()]
    for what, shown, changes in calls:
        masked = replace(inputs, shown=shown.to(run.device))
        rules = {name: value for name, value in changes.items() if name != "return_lse"}
        run.vary(what, masked, masked.truth(**rules), **changes)


def _unequal_sinks(inputs: AttentionInputs) -> Tensor:
    # About as large as the logits of needles.
    return torch.linspace(8.0, 14.0, inputs.case.num_qo_heads, device=inputs.query.device)


CHECK = Check("K11", __doc__, _cases, _judge, kinds=WITHOUT_RANKS)
