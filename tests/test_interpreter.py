"""What the interpreter is spared gives what it gave."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import language as tl

from lab.calls.problem import AttentionCall
from lab.checks import Outcome, judge_case
from lab.checks.run.workers import Workers
from lab.interpreter import INTERPRETER, OTHERWISE_THAN_A_GPU, LanguagePatches, by_scalar_name, noting_bf16
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase
from tests.checks.interpreted_kernels import stored_by
from tests.checks.small import decoding
from tests.devices import IN_INTERPRETER

SAYS_WHO_PATCHES = """
def trtllm_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, **arguments):
    from triton.runtime import interpreter
    raise NotImplementedError(f"patched by {interpreter._patch_lang.__module__}")
"""


def of_module(module: str) -> Callable[[], None]:
    def fn() -> None: ...

    fn.__module__ = module
    return fn


def test_each_module_once_in_a_launch_and_always_outside() -> None:
    patched: list[str] = []
    kernel, helper = of_module("kernels"), of_module("helpers")

    def launch(executor: str, fails: bool = False) -> None:
        for fn in (kernel, helper, helper, kernel):
            patches.patch_language(fn)
        if fails:
            raise ValueError(executor)

    patches = LanguagePatches(launch, lambda fn: patched.append(fn.__module__))
    patches.launch("first")
    assert patched == ["kernels", "helpers"]
    with pytest.raises(ValueError, match="second"):
        patches.launch("second", fails=True)
    assert patched == ["kernels", "helpers"] * 2
    for _ in range(2):
        patches.patch_language(helper)
    assert patched == ["kernels", "helpers"] * 2 + ["helpers"] * 2


def test_what_restores_the_language_reaches_the_launch() -> None:
    """The interpreter's launch patches first, and calls `restore()` on what it gets."""
    scope = object()
    assert LanguagePatches(lambda executor: None, lambda fn: scope).patch_language(of_module("kernels")) is scope


def test_numpys_dtype_is_looked_up_once_for_each_type_of_element() -> None:
    asked: list[str] = []

    def np_dtype_of(tt_dtype: tl.dtype) -> str:
        asked.append(str(tt_dtype))
        return f"of {tt_dtype}"

    looked_up = by_scalar_name(np_dtype_of)
    pointer, other = tl.pointer_type(tl.bfloat16), tl.pointer_type(tl.float32)
    types = (tl.int32, tl.block_type(tl.int32, [16]), tl.block_type(tl.int32, [4, 4]), pointer, other, tl.bfloat16)
    for _ in range(2):
        assert [looked_up(each) for each in types] == ["of int32"] * 3 + [f"of {each}" for each in types[3:]]
    assert asked == [str(tl.int32), *(str(each) for each in types[3:])]


def test_a_process_that_interprets_nothing_imports_nothing() -> None:
    program = f"import sys; from lab.interpreter import quicken; quicken(); print({INTERPRETER!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_worker_of_the_judge_is_quick(tmp_path: Path) -> None:
    """From the case after the one in which Triton is imported."""
    kernel = tmp_path / "kernel.py"
    kernel.write_text(SAYS_WHO_PATCHES)
    case = AttentionCase(AttentionCall.DECODE, kv_lens=(3,), q_lens=(1,))
    with Workers(str(kernel), torch.device("cpu"), Ranges(), time_limit_s=60.0) as isolation:
        said = [isolation.submit("K1", case)().declines for _ in range(2)]
    assert said == [(f"patched by {INTERPRETER}",), ("patched by lab.interpreter",)]


@IN_INTERPRETER
@pytest.mark.parametrize(
    ("kernel", "factor", "dtype", "outcome"),
    [
        ("store_rounded", 1.0, "bf16", Outcome.RIGHT),
        ("store_rounded", 1.06, "bf16", Outcome.WRONG),  # the interpreter did nothing that a GPU does not
        ("store", 1.0, "bf16", Outcome.DECLINED),  # it truncates, which is too much for the bound
        ("store", 1.0, "fp16", Outcome.RIGHT),
        ("store", 1.06, "fp16", Outcome.WRONG),
        ("store", 3.0, "bf16", Outcome.WRONG),  # which no truncation explains
        ("multiply", 1.0, "bf16", Outcome.DECLINED),
        ("multiply", 3.0, "bf16", Outcome.DECLINED),
        ("multiply", 3.0, "fp16", Outcome.WRONG),
        ("sum", 1.0, "bf16", Outcome.DECLINED),
        ("sum", 1.0, "fp16", Outcome.RIGHT),
    ],
)
def test_what_the_interpreter_does_to_bf16_is_not_the_kernels_verdict(
    kernel: str, factor: float, dtype: str, outcome: Outcome
) -> None:
    both = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    case = AttentionCase(AttentionCall.DECODE, (200, 333), (1, 1), dtype=both, kv_dtype=both, head_dim=64)
    verdict = judge_case(stored_by(kernel, factor), "K1", case, device="cpu")
    assert verdict.outcome is outcome, verdict
    is_unjudged = outcome is Outcome.DECLINED
    assert (verdict.judged.by_lab, OTHERWISE_THAN_A_GPU in verdict.judged.declines) == (is_unjudged, is_unjudged)
    assert not is_unjudged or not (verdict.judged.judged or verdict.judged.results or verdict.judged.wrongs)


@IN_INTERPRETER
@pytest.mark.parametrize(
    ("dtype", "returned"),
    [
        (torch.bfloat16, lambda out: torch.cat((out, out), 1)),
        (torch.bfloat16, lambda out: out.to(torch.int32)),
        (torch.float16, lambda out: 3.0 * out),
    ],
    ids=["shape", "dtype", "fp16"],
)
def test_what_the_interpreter_does_to_bf16_explains_no_other_error(dtype: torch.dtype, returned: Any) -> None:
    """A kernel may compute with bf16 only so that its errors are explained."""
    case = AttentionCase(AttentionCall.DECODE, (20, 33), (1, 1), dtype=dtype, kv_dtype=dtype, head_dim=64)
    multiplied = stored_by("multiply").trtllm_batch_decode_with_kv_cache

    def decode(**arguments: Any) -> Any:
        if arguments["query"].dtype is torch.float16:
            multiplied(**arguments | {"out": torch.empty_like(arguments["query"], dtype=torch.bfloat16)})
        return returned(multiplied(**arguments))

    assert judge_case(decoding(decode), "K1", case, device="cpu").outcome is Outcome.WRONG


@IN_INTERPRETER
def test_the_methods_of_the_interpreter_are_its_own_again_afterwards() -> None:
    interpreter = sys.modules[INTERPRETER]
    before = dict(vars(interpreter.InterpreterBuilder)), dict(vars(interpreter.ReduceOps))
    with noting_bf16():
        assert vars(interpreter.ReduceOps) != before[1]
    assert (vars(interpreter.InterpreterBuilder), vars(interpreter.ReduceOps)) == before
