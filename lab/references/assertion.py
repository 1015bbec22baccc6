"""An assertion for tests of other projects: compare a kernel's output with float64 results, by the bound of `lab judge`."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.calls import CALL_TYPES, PagedAttention, Problem, refuse_nan
from lab.calls.entries import places_of_requests, selections_of
from lab.calls.entry import with_own_settings
from lab.calls.problem import E4M3, shown_draft_tokens
from lab.references.errors import Truth
from lab.references.paged_attention import plain_v_scales
from lab.references.plain_attention import check_arithmetic
from lab.references.quantization import dequantize_nvfp4
from lab.references.softmax_attention import History, Rules
from lab.references.truth import truth_of_requests, truth_of_selected, with_requests

NEXT_STEP = "`lab judge` with the kernel's module or file finds which other calls are wrong"


@with_own_settings
def assert_close_to_reference(
    out: Tensor | tuple[Tensor, Tensor],
    /,
    lse: Tensor | None = None,
    *,
    arithmetic: torch.dtype | None = None,
    check_dtype: bool = True,
    **the_same_arguments: Any,
) -> None:
    """Assert that a kernel's output is right for its arguments, by the judge's bound.

    The output vector of each row and head is compared with float64 attention on the same inputs. Its relative L2 error may be
    at most `lab.references.errors.CONTROL_FACTOR` times the error that plain low-precision torch operations (`eager_attention`)
    make on the same request, or the error of two roundings if that is more. This is the bound of `lab.checks.judge`. If all
    vectors are within this bound, no group of vectors, such as those of one head, may be too large or too small by more than
    rounding explains (`lab.references.errors.regress`). Rows after the last request's rows are padding and are not compared.

    Args:
        out: the kernel's return value: the output, or (out, lse). An `out` among the arguments is compared too.
        lse: the LSE tensor that the kernel filled, in the base and shape that the call defines; None: no LSE is compared.
        arithmetic: dtype to which the kernel is known to round the operands of Q·K^T and of P·V, such as e4m3 over an e4m3
            cache; None: the query's dtype.
        check_dtype: False accepts an output of another dtype than the call's, with the bound of the call's dtype.
        the_same_arguments: the kernel's keyword arguments. Their names determine which of FlashInfer's functions the kernel
            implements (`lab.calls.CALL_TYPES`). Their present contents are read, and none is written. `workspace_buffer` may be
            left out.

    Raises:
        AssertionError: the output or the LSE is wrong. The message has row, request, head, error and bound of the worst
            vectors, or the factor by which a group of vectors is wrong.
        TypeError: the arguments belong to none of FlashInfer's functions.
        ValueError: the arguments contradict each other, `out` lies in the query's memory, or the expected result is not finite.
        NotImplementedError: the lab does not model an argument.
    """
    __tracebackhide__ = True  # pytest shows the line of the test and the message
    if arithmetic is not None:
        check_arithmetic(arithmetic)
    call = _call_of({"workspace_buffer": None} | the_same_arguments)
    if lse is not None and hasattr(call, "return_lse"):
        call = replace(call, return_lse=True)  # a call with its own `lse` does not need it
    problem = call.problem()
    if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
        problem.check_values()
    refuse_nan(problem)
    returned, returned_lse = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    outputs = [("", returned)]
    if call.out is not None and call.out is not returned:  # a kernel that returns its result has to write it there too
        outputs.append(("the given out: ", call.out))
    wrongs = [wrong for _, each in outputs for wrong in _wrong_form(problem, call, each, check_dtype)]
    if not wrongs:
        has_rows = not problem.has_no_rows and problem.row_offsets()[-1] > 0
        truth = truth_of_problem(problem, arithmetic) if has_rows else None
        wrongs += [f"{where}{wrong}" for where, each in outputs for wrong in _wrong_vectors(each, truth)]
        for each in (returned_lse, None if lse is returned_lse else lse):
            wrongs += [] if each is None else _wrong_lse(problem, call, each, truth)
    if wrongs:
        raise AssertionError("\n".join((*(f"{problem.call.value}: {wrong}" for wrong in wrongs), NEXT_STEP)))


def _call_of(arguments: dict[str, Any]) -> Any:
    errors: dict[type[Any], TypeError] = {}
    for call in CALL_TYPES.values():
        try:
            inspect.signature(call).bind(**arguments)
        except TypeError as error:
            errors[call] = error
        else:
            return call(**arguments)
    nearest = max(errors, key=lambda call: len(set(arguments) & set(inspect.signature(call).parameters)))
    raise TypeError(
        f"no call of FlashInfer has these arguments; the nearest is {nearest.function.value}: {errors[nearest]}"
    )


def _wrong_form(problem: Problem, call: Any, out: Any, check_dtype: bool) -> list[str]:
    shapes = [(*query.shape[:-1], problem.v_head_dim) for query in (call.query, problem.query)]
    if misfit := _misfit("the output", out, shapes, problem.query.device):
        return [misfit]
    if out.numel() and out.data_ptr() == problem.query.data_ptr():
        raise ValueError("out lies in the query's memory, so that the query is gone: pass a copy of the query here")
    if not out.dtype.is_floating_point:
        return [f"the output is {out.dtype}, not {problem.out_dtype}"]
    if check_dtype and out.dtype != problem.out_dtype:
        return [f"the output is {out.dtype}, not {problem.out_dtype} (check_dtype=False allows it)"]
    return []


def _misfit(what: str, result: Any, shapes: Sequence[tuple[int, ...]], device: torch.device) -> str:
    if not isinstance(result, Tensor):
        return f"{what} is of type {type(result).__name__}, not a tensor"
    if tuple(result.shape) not in shapes:
        return f"{what} is {list(result.shape)}, not {list(shapes[0])}"
    return "" if result.device == device else f"{what} is on {result.device}, not on {device}"


def _wrong_vectors(out: Tensor, truth: Truth | None) -> list[str]:
    if truth is None:
        return []
    rows = out.flatten(0, -3)[: len(truth.expected)]
    comparison = truth.compare(rows)
    return [] if comparison.passed else [truth.wrong_output(comparison, rows)]


def _wrong_lse(problem: Problem, call: Any, lse: Any, truth: Truth | None) -> list[str]:
    shapes = [tuple(query.shape[:-1]) for query in (problem.query, call.query)]
    if misfit := _misfit("the LSE", lse, shapes, problem.query.device):
        return [misfit]
    if truth is None:
        return []
    rows = lse.flatten(0, -2)[: len(truth.lse_log2)]
    wrong = truth.wrong_lse(lse_in_base_2(rows, getattr(call, "lse_is_base_e", False)))
    return [wrong] if wrong else []


def lse_in_base_2(lse: Tensor, is_base_e: bool) -> Tensor:
    return lse.to(torch.float64) / math.log(2.0) if is_base_e else lse


def truth_of_problem(
    problem: Problem,
    arithmetic: torch.dtype | None = None,
    *,
    requests: Sequence[int] | None = None,
    histories: Sequence[History] | None = None,
) -> Truth:
    """Return the expected results of a checked problem, whose K and V are read through its page tables or offsets: the output
    and LSE in float64, and the control. At least one request must have query rows.

    Args:
        arithmetic: dtype of the operands in the control, the low-precision attention whose error bounds a kernel's error; None:
            the query's dtype, or e4m3 if the query has one scale per block.
        requests: the requests whose rows are computed, in this order; None: all.
        histories: the result of `histories_of` for the same requests; None: it is computed. Ignored for block-sparse calls.
    """
    if isinstance(problem, PagedAttention):
        problem = problem.of_one_pool()
    elif problem.block_scales is not None:
        problem, arithmetic = problem.dequantized(), E4M3 if arithmetic is None else arithmetic
    if isinstance(problem, PagedAttention) and problem.is_block_sparse:
        return Truth.of_heads(
            [truth_of_problem(of_head, arithmetic, requests=requests) for of_head in problem.of_kv_heads()]
        )
    chosen = range(problem.batch_size) if requests is None else requests
    offsets = problem.row_offsets()
    q_lens = [offsets[request + 1] - offsets[request] for request in chosen]
    if isinstance(problem, PagedAttention) and problem.num_visible is not None:
        rows = [row for request in chosen for row in range(offsets[request], offsets[request + 1])]
        return with_requests(truth_of_problem(problem.of_rows(), arithmetic, requests=rows), q_lens)
    histories = histories_of(problem, chosen) if histories is None else list(histories)
    query = torch.cat([problem.query[offsets[request] : offsets[request + 1]] for request in chosen])
    if isinstance(problem, PagedAttention) and problem.selected is not None:
        selected = [indices for _, indices in selections_of(problem, chosen)]
        return truth_of_selected(query, histories, selected, Rules.of(problem, arithmetic))
    mask = problem.mask if isinstance(problem, PagedAttention) else None
    shown = None if mask is None else shown_draft_tokens(mask.to(torch.int32)[list(chosen)])
    return truth_of_requests(query, histories, q_lens, Rules.of(problem, arithmetic, shown))


def histories_of(problem: Problem, requests: Sequence[int] | None = None) -> list[History]:
    """Return one tuple (K, V) per request (`requests` None: of all), both [kv_len, num_kv_heads, head_dim], read through the
    problem's page tables or offsets. If query rows select cache entries, K and V have only the selected entries.
    """
    chosen = range(problem.batch_size) if requests is None else requests
    if not isinstance(problem, PagedAttention):
        parts = problem.dequantized().parts()
        return [parts[request] for request in chosen]
    problem = problem.of_one_pool()
    sides = ((problem.k_cache, problem.k_scale_factors), (problem.v_cache, plain_v_scales(problem)))
    histories = []
    for places in places_of_requests(problem, chosen):
        k, v = (_entries(*side, at, problem.page_size) for side, at in zip(sides, places, strict=True))
        histories.append((k, v))
    return histories


def _entries(cache: Tensor, scale_factors: Tensor | None, places: Tensor, page_size: int) -> Tensor:
    slots = places // page_size, slice(None), places % page_size
    entries = cache[slots]
    if scale_factors is None:
        return entries
    return dequantize_nvfp4(entries, scale_factors[slots]).to(torch.float32)  # exact: of six bits
