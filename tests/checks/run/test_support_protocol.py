"""Which errors of an implementation decline a call, and which fail it."""

import asyncio
import importlib
import ipaddress
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab import interpreter
from lab.calls.problem import AttentionCall
from lab.checks import AttentionCase, Outcome, judge
from lab.checks.case_run import CaseRun
from lab.checks.properties import checks
from lab.checks.properties.check import Check
from lab.checks.run.judging import Refusals, run_case
from lab.checks.run.support_protocol import KernelError, Unsupported, _has_raised, invoke, raised
from lab.checks.run.verdicts import Judged
from lab.loading import load
from lab.ranges import Ranges
from lab.references import trtllm_batch_decode_with_kv_cache as right
from tests.checks import hostile_kernels
from tests.checks.hostile import Odd
from tests.checks.small import decoding

CPU = torch.device("cpu")
CASE = AttentionCase(AttentionCall.DECODE, (20, 33), (1, 1), group=2)
ORACLE = next(check for check in checks() if check.key == "K1")


def refusing(function: Callable[..., Any], refusals: Any = None) -> Callable[..., Any]:
    return lambda *args, **arguments: invoke(function, args, arguments, refusals)


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*args: Any, **arguments: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("no"),
        ValueError("no"),
        AssertionError("no"),
        TypeError("inner() got an unexpected keyword argument 'sinks' no"),
        TypeError("unexpected argument 'sinks' no"),
        TypeError("decode() does not support sinks no"),
        TypeError("inner() missing 1 required positional argument: 'no'"),
    ],
)
def test_a_refusal_is_declined(error: Exception) -> None:
    with pytest.raises(Unsupported, match="no"):
        refusing(raising(error))(sinks=1)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no"),
        KeyError("no"),
        SystemExit("no"),
        GeneratorExit("no"),
        asyncio.CancelledError("no"),
        TypeError("object of type 'int' has no len()"),
        TypeError("helper() got an unexpected keyword argument 'tile' no"),  # its own mistake: nobody gave it one
        TypeError("unsupported operand type(s) for +: 'NoneType' and 'float' no"),
    ],
)
def test_anything_else_fails(error: BaseException) -> None:
    with pytest.raises(KernelError, match=rf"^it raised {type(error).__name__}: .*no"):
        refusing(raising(error))(sinks=1)


def test_an_error_without_a_message_is_named_alone() -> None:
    assert str(raised(MemoryError())) == "it raised MemoryError"


@pytest.mark.parametrize(
    "function",
    [
        lambda: [keys for keys, values in [(1, 2, 3, 4)]],  # type: ignore[misc]
        lambda: torch.utils.data.RandomSampler([1], num_samples=-1),
        lambda: ipaddress.ip_address("no"),
    ],
    ids=["python", "torch", "library"],
)
def test_an_error_that_no_statement_of_the_kernel_raised_fails(function: Callable[..., Any]) -> None:
    with pytest.raises(KernelError, match="it raised ValueError"):
        refusing(function)()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two installed packages: `outer_package` calls `inner_package`, and both refuse."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "inner_package.py").write_text("def refuse(**arguments):\n    raise ValueError('not by me')\n")
    (folder / "outer_package.py").write_text(
        "import inner_package\nfrom inner_package import refuse as deep\n"
        "def own(**arguments):\n    raise ValueError('not by me')\n"
        "def below(**arguments):\n    return inner_package.refuse()\n"
    )
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("outer_package")
    for name in ("outer_package", "inner_package"):
        del sys.modules[name]


def test_a_package_that_the_kernel_calls_may_refuse_and_one_below_it_may_not(packages: Any) -> None:
    """The kernel is a function of an installed package, or one that calls it."""
    of_own = (lambda **_: packages.own(), lambda **_: packages.deep())
    for refused in (packages.own, packages.deep, packages.below, *of_own):
        with pytest.raises(Unsupported, match="not by me"):
            refusing(refused)()
    with pytest.raises(KernelError, match="not by me"):
        refusing(lambda **_: packages.below())()


def test_what_the_interpreter_cannot_run_is_not_judged() -> None:
    if not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton compiles its kernels here")
    for launch, sentence in (
        (hostile_kernels.launch_an_alias, "Did you forget to add @triton.jit"),
        (hostile_kernels.launch_assembly, "inline_asm not supported in interpreter mode"),
    ):
        with pytest.raises(Unsupported, match=f"not judged here, for Triton's interpreter cannot run it .*{sentence}"):
            refusing(launch)()
    for launch, sentence in (
        (hostile_kernels.launch_an_assertion, "InterpreterError: AssertionError"),
        (hostile_kernels.launch_a_wrong_product, "InterpreterError: AssertionError"),
        (hostile_kernels.launch_a_wrong_axis, "out of bounds for shape"),
        (raising(RuntimeError("no @triton.jit")), "no @triton.jit"),
    ):
        with pytest.raises(KernelError, match=sentence):
            refusing(launch)()


def test_the_interpreters_cure_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 converts arrays of one number to numbers, which NumPy does since 2.4 no more."""
    for triton, numpy, cure in (
        ("3.6.0", "2.4.6", "NumPy before 2.4"),
        ("3.6.0", "2.3.5", "on a GPU"),
        ("3.7.1", "2.5.0", "on a GPU"),
    ):
        versions = {"triton": triton, "numpy": numpy}
        monkeypatch.setattr("lab.interpreter.version", versions.get)
        assert cure in interpreter._cure()


def test_a_missing_argument_is_a_refusal_of_the_signature_and_of_what_it_forwards_to_alone() -> None:
    def inside(query: Any) -> Any:
        return (lambda stride: stride)()  # type: ignore[call-arg]

    with pytest.raises(Unsupported, match="missing a required argument"):
        refusing(inside)()
    with pytest.raises(KernelError, match="missing 1 required positional argument"):
        refusing(inside)(query=1)


def test_an_assertion_without_a_message_is_told_by_its_line() -> None:
    def function(query: Any) -> Any:
        if query != 1:
            raise AssertionError

    with pytest.raises(Unsupported, match="AssertionError: raise AssertionError"):
        refusing(function)(query=2)


@pytest.mark.parametrize("form", ["out", "kv_cache", "V of kv_cache", "workspace_buffer"])
def test_an_assertion_after_a_tensor_was_written_is_no_refusal_unless_it_is_the_workspace(form: str) -> None:
    name, written = form.removeprefix("V of "), torch.ones(2, 3)

    def function(**_: Any) -> None:
        written[1] = 0.0
        raise AssertionError("too late")

    given = (torch.ones(2, 3), written) if form == "V of kv_cache" else written
    with pytest.raises(Unsupported if name == "workspace_buffer" else KernelError, match="too late"):
        refusing(function)(**{name: given})


@pytest.mark.parametrize(
    ("handler", "error", "says"),
    [
        (signal.default_int_handler, KeyboardInterrupt, "mine"),
        (signal.SIG_IGN, KernelError, "it raised KeyboardInterrupt: mine"),
    ],
)
def test_a_keyboard_interrupt_is_the_kernel_s_where_ctrl_c_is_ignored_alone(
    handler: Any, error: type[BaseException], says: str
) -> None:
    held = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(error, match=says):
            refusing(raising(KeyboardInterrupt("mine")))()
    finally:
        signal.signal(signal.SIGINT, held)


def test_another_refusal_after_the_output_was_written_is_late() -> None:
    def function(out: torch.Tensor) -> None:
        out[1] = 0.0
        raise NotImplementedError("too late")

    with pytest.raises(Unsupported, match="too late") as declined:
        refusing(function)(out=torch.full((2, 3), torch.nan))
    assert declined.value.late


def test_the_user_says_which_exceptions_are_refusals_instead() -> None:
    named = Refusals.of("KeyError, tests.checks.hostile.Odd").resolve()
    assert named == (KeyError, Odd)
    for error in (KeyError("no"), Odd("no")):
        with pytest.raises(Unsupported, match="no"):
            refusing(raising(error), named)()
    for other in (ValueError("no"), NotImplementedError("no"), AssertionError("no")):
        with pytest.raises(KernelError, match="no"):
            refusing(raising(other), named)()
    judged = run_case(decoding(raising(Odd("no"))), ORACLE, CASE, CPU, Ranges(), named)
    assert (judged.outcome, judged.declines) == (Outcome.DECLINED, ("no",))


KERNEL_OF_A_FILE = """
from errors_of_mine import Elsewhere
class Mine(Exception):
    pass
def trtllm_batch_decode_with_kv_cache(**arguments):
    raise Mine("not today")
"""


@pytest.mark.parametrize(
    "names", ["Mine", "my/kernel.py:Mine", "my.kernel.Mine", "kernel.Mine", "my.kernel:Mine", "Elsewhere"]
)
@pytest.mark.parametrize("kernel", ["my/kernel.py", "my.kernel", "my/kernel.py:trtllm_batch_decode_with_kv_cache"])
def test_an_exception_of_the_kernel_s_module_is_found_in_the_module_that_is_judged(
    names: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my").mkdir()
    (tmp_path / "my/kernel.py").write_text(KERNEL_OF_A_FILE)
    (tmp_path / "my/errors_of_mine.py").write_text("class Elsewhere(Exception):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "my"), *sys.path])
    for module in ("my", "my.kernel", "errors_of_mine"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    implementation = load(kernel)
    found = Refusals.of(names, kernel)
    (named,) = found.resolve()
    module = sys.modules[implementation.trtllm_batch_decode_with_kv_cache.__module__]
    assert named is getattr(module, named.__name__)
    assert pickle.loads(pickle.dumps(Refusals.of([named]))).resolve() == (named,)
    assert pickle.loads(pickle.dumps(found)) == found
    assert Refusals.of(",".join(found.names), kernel).resolve() == (named,)


def test_a_process_that_names_refusals_does_not_import_the_kernel(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel_that_looks.py"
    looks = "import os\nwith open(__file__ + '.seen', 'a') as file:\n    print(os.getpid(), file=file)\n"
    kernel.write_text(looks + KERNEL_OF_A_FILE.replace("from errors_of_mine import Elsewhere\n", ""))
    ranges = Ranges(page_sizes=(16,), head_dims=(64,), groups=(2,), q_lens=(1,))
    how: dict[str, Any] = {"only": ["K1"], "functions": [AttentionCall.DECODE.value], "ranges": ranges, "device": "cpu"}
    how |= {"drawn": 0, "isolated": True, "discover": False, "workers": 1, "level": "quick"}
    report = judge(str(kernel), refusals="Mine", **how)
    assert report.refusals == (f"{kernel}:Mine",)
    assert {verdict.outcome for verdict in report.verdicts} == {Outcome.DECLINED}
    assert str(os.getpid()) not in Path(f"{kernel}.seen").read_text().split()
    with pytest.raises(ValueError, match="'Mein' is no exception"):
        judge(str(kernel), refusals="Mein", **how)


@pytest.mark.parametrize(
    ("error", "named"),
    [(Odd("no"), "Odd"), (RuntimeError("no"), ""), (asyncio.QueueFull("no"), "")],
)
def test_an_exception_of_the_kernel_s_own_is_said_to_be_perhaps_a_refusal(error: Exception, named: str) -> None:
    judged = run_case(decoding(raising(error)), ORACLE, CASE, CPU, Ranges())
    says = f"if the kernel refuses a call by raising {named}, say so: --refusals {named}"
    assert (judged.outcome, judged.remarks) == (Outcome.FAILED, (says,) if named else ())


@pytest.mark.parametrize("name", ["Nothing", "nowhere.Error", "lab.checks.judge", "len"])
def test_a_refusal_that_is_no_exception_is_told_in_a_sentence(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is no exception"):
        Refusals.of(name).resolve()


def judged_by(judge: Callable[[CaseRun], None], function: Callable[..., Any] = right) -> Judged:
    return run_case(decoding(function), Check("K0", "", lambda *_: (), judge), CASE, CPU, Ranges())


def test_a_failed_call_does_not_end_the_check_nor_hide_what_is_wrong() -> None:
    def decode(bmm1_scale: float = 1.0, bmm2_scale: float = 1.0, **arguments: Any) -> Any:
        if bmm1_scale < 0:
            raise RuntimeError("boom")
        return right(bmm1_scale=bmm1_scale, **arguments)

    def judge(run: CaseRun) -> None:
        inputs = run.build()
        run.vary("negative", inputs, inputs.truth(), bmm1_scale=-1.0)
        run.vary("scaled", inputs, inputs.truth(bmm2_scale=2.0), bmm2_scale=2.0)

    judged = judged_by(judge, decode)
    assert judged.outcome is Outcome.WRONG
    assert [wrong.split(":")[0] for wrong in judged.wrongs] == ["scaled", "negative"]
    assert judged.wrongs[1] == "negative: it raised RuntimeError: boom"
    assert judged.judged == 1


def test_an_error_of_the_lab_s_is_not_blamed_on_the_implementation() -> None:
    def early(run: CaseRun) -> None:
        raise IndexError("a bug")

    def late(run: CaseRun) -> None:
        run.call(run.build())
        raise IndexError("a bug")

    judged = judged_by(early)
    assert (judged.outcome, judged.wrongs) == (Outcome.DECLINED, ())
    assert judged.declines == ("a part of the lab failed, and not the implementation: IndexError: a bug",)
    (after,) = judged_by(late).wrongs
    assert "or at a bug of the lab's own: IndexError: a bug" in after


@pytest.mark.parametrize(
    "error",
    [MemoryError("no room"), torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate")],
)
def test_memory_that_the_lab_lacks_after_a_call_is_not_blamed_on_the_implementation(error: Exception) -> None:
    def of_the_lab(run: CaseRun) -> None:
        run.call(run.build())
        run.judged += 1  # a result that was compared before
        raise error

    def of_the_kernel(**_: Any) -> Any:
        raise error

    judged = judged_by(of_the_lab)
    assert (judged.outcome, judged.wrongs, judged.by_lab) == (Outcome.DECLINED, (), True)
    (sentence,) = judged.declines
    cause = f"no memory was left ({type(error).__name__}): judge with fewer --workers"
    assert sentence == f"a part of the lab failed, and not the implementation: {cause}"
    judged = run_case(decoding(of_the_kernel), checks()[0], CASE, CPU, Ranges())
    assert (judged.outcome, judged.by_lab) == (Outcome.FAILED, False)


def test_messages_of_a_kernel_move_no_cursor() -> None:
    judged = Judged(Outcome.WRONG, wrongs=("it failed: \x1b[2Jgone",), declines=("a\rb",), remarks=("two\nlines\x00",))
    assert (judged.wrongs, judged.declines) == ((r"it failed: \x1b[2Jgone",), (r"a\rb",))
    assert judged.remarks == ("two\nlines" + r"\x00",)


def test_a_function_without_a_signature_is_called() -> None:
    assert refusing(dict)(a=1) == {"a": 1}


def test_compiled_code_and_an_error_that_is_its_own_cause_refuse() -> None:
    """NumPy's generator is Cython's, whose frames have a few opcodes that say nothing."""
    with pytest.raises(ValueError, match="low >= high") as compiled:
        np.random.default_rng().integers(5, 1)
    assert _has_raised(compiled.value, ["kernel", "kernel"])

    def refuses(**arguments: Any) -> Any:
        try:
            raise ValueError("not this")
        except ValueError as error:
            raise error from error

    with pytest.raises(Unsupported, match="not this"):
        invoke(refuses, (), {}, None)
