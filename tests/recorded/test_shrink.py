"""Wrong recorded calls are shrunk to what makes them wrong, and a program shows it without the lab."""

import ast
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from corpus.kernels import kernel
from lab import references
from lab.calls import AttentionCall
from lab.calls.arguments import RESULTS
from lab.calls.entries import keys_per_offset
from lab.recorded import Recorder, Triggers, own_form
from lab.recorded.call import (
    Fault,
    Reason,
    RecordedCall,
    RecordingError,
    fault_by_calling,
    fault_of,
    recorded_fault,
)
from lab.recorded.repro import repro, write_repro
from lab.recorded.shrink import (
    Part,
    cut,
    fewer_heads,
    fewer_pages,
    fewer_requests,
    fewer_rows,
    shrunk,
    without_dead_slots,
)
from tests.cases import arguments_of, random_batch
from tests.commands.command import run
from tests.recorded.kinds import CALLS, NVFP4, RANKS, SINKS, decode, int32, latent, verify
from tests.recorded.record_calls import HEADS, LENGTHS, PAGE_SIZE, decode_arguments
from tests.recorded.write_calls import same, write_call

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
DECODE = AttentionCall.DECODE
WRONG = """
from lab import references

def trtllm_batch_decode_with_kv_cache(**arguments):
    return references.trtllm_batch_decode_with_kv_cache(**arguments | {"bmm2_scale": 1.0})
"""


def _smallest(call: RecordedCall, function: Callable[..., Any], **settings: Any) -> tuple[RecordedCall, Fault | None]:
    return shrunk(call, partial(fault_by_calling, function, CPU), **settings)


class Program(NamedTuple):
    text: str
    saved: Mapping[str, Tensor]


def _program(call: RecordedCall, fault: Fault | None = None) -> Program:
    saved: dict[str, Tensor] = {}
    return Program(repro(call, fault, "", saved), saved)


def _written(folder: Path) -> Program:
    file = folder / "repro.pt"
    return Program((folder / "repro.py").read_text(), torch.load(file) if file.exists() else {})


def _status(
    program: Program,
    function: Callable[..., Any] | None,
    call: AttentionCall = DECODE,
    words: tuple[str, ...] = ("cpu",),
) -> int:
    """Run a program, on the CPU unless `words` are other arguments, with a function in the place of FlashInfer's (None:
    without FlashInfer), and return its exit status.
    """
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    vars(package)["__version__"] = "0"
    setattr(module, call.value, function)
    modules = {"flashinfer": package, "flashinfer.decode": module, "flashinfer.prefill": module}
    modules = modules if function else dict.fromkeys(modules)
    argv = mock.patch.object(sys, "argv", ["repro.py", *words])
    read = mock.patch.object(torch, "load", return_value=program.saved)
    text = program.text.replace("128 << 20", "1 << 20")  # of the workspace
    with mock.patch.dict(sys.modules, modules), argv, read, pytest.raises(SystemExit) as ended:
        exec(compile(text, "repro.py", "exec"), {"__name__": "__main__", "__file__": "repro.py"})
    return int(str(ended.value.code))


def _arguments_of(program: Program, call: AttentionCall = DECODE) -> dict[str, Any]:
    """Return the arguments of the call that a program makes, without the workspace."""
    given: dict[str, Any] = {}

    def end(workspace_buffer: Tensor, **arguments: Any) -> None:
        given.update(arguments)
        raise RuntimeError("the arguments are known")

    _status(program, end, call)
    return given


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda returned: (returned[0] * factor, returned[1]) if isinstance(returned, tuple) else returned * factor


def _wrong(
    then: Callable[[Any], Any],
    where: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    of: Callable[..., Any] = references.trtllm_batch_decode_with_kv_cache,
) -> Callable[..., Any]:
    """Return a function that is right, except where a condition of its arguments holds: there its result is changed."""

    def call(**arguments: Any) -> Any:
        returned = of(**arguments)
        return then(returned) if where(arguments) else returned

    return call


def _right(call: RecordedCall) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(references, call.function.value)
    return function


@pytest.mark.parametrize("name", [*CALLS, *RANKS])
def test_a_program_expects_what_the_references_return(name: str) -> None:
    call = (CALLS | RANKS)[name]
    program, right = _program(call), _right(call)
    given = _arguments_of(program, call.function)
    assert all(same(value, call.given[argument]) for argument, value in given.items() if argument not in RESULTS)
    assert _status(program, right, call.function) == 0
    assert _status(program, _wrong(_times(1.05), of=right), call.function) == 1


@pytest.mark.parametrize("name", CALLS)
def test_each_call_shrinks_to_one_vector_when_every_vector_is_wrong(name: str) -> None:
    call = CALLS[name]
    wrong = _wrong(_times(1.5), of=_right(call))
    smaller, fault = _smallest(call, wrong)
    assert fault is not None
    assert fault.reason is Reason.OUTPUT
    problem = smaller.problem()
    assert (problem.num_rows, problem.max_kv_len, problem.return_lse, problem.sinks) == (1, 1, False, None)
    assert _facts(smaller) | {"mask": False} == MINIMAL
    assert smaller.drawn >= {name for name in ("query", "kv_cache", "key", "value") if name in call.given}
    program = _program(smaller, fault)
    assert program.saved == {}
    assert len(program.text) < 6600
    given = _arguments_of(program, call.function)
    assert "query" in given
    assert all(same(value, smaller.given[argument], has_strides=False) for argument, value in given.items())
    assert _status(program, wrong, call.function) == 1
    assert _status(program, _right(call), call.function) == 0


def test_a_bias_of_many_vectors_is_wrong_and_cannot_be_shrunk() -> None:
    batch = random_batch([1] * 32, [200] * 32, heads=(8, 8), head_dim=128)
    arguments = {**arguments_of(DECODE.value, batch), "return_lse": False, "lse": None}
    call, right = RecordedCall(DECODE, arguments), references.trtllm_batch_decode_with_kv_cache(**arguments)
    fault = fault_of(call, right * 1.002, None)
    assert fault is not None
    assert fault.reason is Reason.BIAS
    assert fault_of(call, right, None) is None
    with pytest.raises(RecordingError, match=r"has too few vectors: .* too large: factor 1\.002"):
        shrunk(replace(call, out=right * 1.002), recorded_fault)


def test_a_result_without_rows_is_not_right() -> None:
    call = latent()
    out = _right(call)(**call.arguments())
    for wrong in (out[:0], out.flatten(1)):  # the latter is no error of the axes that are put together
        with pytest.raises(ValueError, match="shape"):
            fault_of(call, wrong, None)


def _rows(call: RecordedCall) -> Tensor:
    returned = _right(call)(**call.arguments())
    return (returned[0] if isinstance(returned, tuple) else returned).flatten(0, -3)


@pytest.mark.parametrize("name", [*CALLS, "decode on a rank"])
def test_a_smaller_call_has_the_results_of_what_it_keeps(name: str) -> None:
    whole = (CALLS | RANKS)[name]
    rows, offsets, last = _rows(whole), whole.problem().row_offsets(), whole.problem().batch_size - 1
    of_last, kv_len = rows[offsets[last] : offsets[-1]], int(whole.problem().seq_lens[last])
    alone = cut(whole, [Part(last, range(len(of_last)), kv_len)])
    assert torch.equal(_rows(alone), of_last)
    assert keys_per_offset(alone.problem()) == keys_per_offset(whole.problem())
    for each in fewer_pages(alone):
        assert torch.equal(_rows(each), of_last)
    with_zeros = [*without_dead_slots(alone)]
    assert len(with_zeros) == ("kv_cache" in whole.given)
    for wiped in with_zeros:
        assert torch.equal(_rows(wiped), of_last)
        assert list(without_dead_slots(wiped)) == []
        live = int((wiped.problem().k_cache != 0).any(dim=3).any(dim=1).sum())
        assert live <= kv_len * (1 if whole.given.get("uses_shared_paged_kv_idx", True) else 2)
    if alone.problem().num_kv_heads > 1:
        second = next(fewer_heads(alone))  # without the first half of the K/V heads
        assert torch.equal(_rows(second), of_last[:, HEADS // 2 :])
    for first_rows, last_rows in zip(*[fewer_rows(alone)] * 2, strict=True):
        width = first_rows.problem().num_rows
        if whole.problem().causal:
            assert torch.equal(_rows(first_rows), of_last[:width])
        if (
            whole.given.get("mask") is None
        ):  # without the rows before them, a mask hides no key that is before the draft
            assert torch.equal(_rows(last_rows), of_last[-width:])


def test_pages_are_numbered_by_the_table_or_in_their_old_order() -> None:
    whole = decode(block_tables=int32([4, 0, 0], [8, 2, 0], [4, 1, 7]))  # of 1, 2 and 3 pages
    by_table, by_id = (each.given["block_tables"].tolist() for each in fewer_pages(whole))
    assert by_table == [[0, 0, 0], [1, 2, 0], [0, 3, 4]]
    assert by_id == [[2, 0, 0], [4, 1, 0], [2, 0, 3]]


def test_rows_of_no_request_are_left_out() -> None:
    assert CALLS["context"].problem().num_rows == 9
    *_, last = fewer_requests(CALLS["context"])
    assert last.problem().num_rows == 7


def _facts(call: RecordedCall) -> dict[str, Any]:
    problem = call.problem()
    return {
        "requests": problem.batch_size,
        "rows": problem.max_q_len,
        "keys": problem.seq_lens.tolist(),
        "heads": (problem.num_qo_heads, problem.num_kv_heads),
        "window": problem.window_left,
        "bmm2_scale": problem.bmm2_scale,
        "mask": getattr(problem, "mask", None) is not None,
    }


MINIMAL = {"requests": 1, "rows": 1, "keys": [1], "heads": (1, 1), "window": -1, "bmm2_scale": 1.0, "mask": False}


@pytest.mark.parametrize(
    ("name", "call", "trigger"),
    [
        ("bmm2_hardcoded_1", decode(bmm2_scale=2.0, window_left=7), {"bmm2_scale": 2.0}),
        ("window_off_by_one_wide", decode(bmm2_scale=2.0, window_left=7), {"window": 7, "keys": [9]}),
        ("heads_interleaved", decode(sinks=SINKS), {"heads": (4, 2)}),
        ("rows_reversed", verify(4), {"rows": 2, "mask": True}),
        ("full_mask_to_causal", verify(4), {"rows": 2, "mask": True}),
        ("equal_lengths_share_keys", decode(seq_lens=int32(9, 9, 4)), {"requests": 2, "keys": [1, 1]}),
    ],
)
def test_a_wrong_kernel_is_shrunk_to_its_trigger(name: str, call: RecordedCall, trigger: dict[str, Any]) -> None:
    function = kernel(name).implementation().trtllm_batch_decode_with_kv_cache
    smaller, fault = _smallest(call, function)
    facts = _facts(smaller)
    if "rows" in trigger:
        facts["keys"] = [1]  # what the rows need
    assert facts == MINIMAL | trigger
    assert _status(_program(smaller, fault), function) == 1
    assert _status(_program(smaller, fault), references.trtllm_batch_decode_with_kv_cache) == 0


def _has_long(arguments: Mapping[str, Any]) -> bool:
    return bool((arguments["seq_lens"] > 20).any())


def _raise(error: type[Exception]) -> Callable[[Any], Any]:
    def then(_: Any) -> Any:
        raise error("too long")

    return then


def _lse_plus_one(returned: Any) -> Any:
    return (returned[0], returned[1] + 1) if isinstance(returned, tuple) else returned


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (_times(2.0), Reason.OUTPUT),
        (_times(torch.nan), Reason.NOT_FINITE),
        (_raise(RuntimeError), Reason.RAISED),
        (_lse_plus_one, Reason.LSE),
    ],
)
def test_a_length_is_found_to_the_key(then: Callable[[Any], Any], reason: Reason) -> None:
    wrong = _wrong(then, _has_long)
    smaller, fault = _smallest(decode(return_lse=True), wrong)
    assert fault is not None
    assert (fault.reason, _facts(smaller)) == (reason, MINIMAL | {"keys": [21]})
    assert smaller.given["return_lse"] == (reason is Reason.LSE)
    assert smaller.given["block_tables"].tolist() == [[0, 1]]
    assert smaller.given["kv_cache"][0].shape == (2, 1, PAGE_SIZE, 64)
    assert _status(_program(smaller, fault), wrong) == 1
    assert _status(_program(smaller, fault), references.trtllm_batch_decode_with_kv_cache) == 0


def test_another_fault_on_the_way_is_not_followed() -> None:
    """Short requests raise, long ones are wrong, and what raises is not the error that was looked for."""

    def wrong(**arguments: Any) -> Any:
        if int(arguments["seq_lens"].max()) <= 20:
            raise RuntimeError("too short")
        return references.trtllm_batch_decode_with_kv_cache(**arguments) * 2

    assert _facts(_smallest(decode(), wrong)[0])["keys"] == [21]

    def raises(**arguments: Any) -> Any:
        raise (TypeError if _has_long(arguments) else KeyError)("too long or too short")

    smaller, fault = _smallest(decode(), raises)
    assert fault is not None
    assert (fault.error, _facts(smaller)["keys"]) == ("TypeError", [21])


def _with_nan_after_its_keys() -> RecordedCall:
    arguments = decode_arguments()
    for side in arguments["kv_cache"]:
        side[arguments["block_tables"][1, 1], :, 1:] = torch.nan  # after 17 keys in pages of 16
    return RecordedCall(DECODE, arguments)


def test_an_output_that_dead_slots_spoil_keeps_their_nan() -> None:
    def wrong(**given: Any) -> Any:
        out = references.trtllm_batch_decode_with_kv_cache(**given)
        spoilt = given["kv_cache"][0][given["block_tables"].long()].isnan().flatten(1).any(dim=1)
        return torch.where(spoilt[:, None, None], torch.nan, out)

    call = _with_nan_after_its_keys()
    by_calling, fault = _smallest(call, wrong)
    assert fault is not None
    assert fault.reason is Reason.NOT_FINITE
    assert "kv_cache" in by_calling.drawn
    recorded, _ = shrunk(replace(call, out=wrong(**call.given)), recorded_fault)
    for smaller in (by_calling, recorded):
        assert _facts(smaller)["requests"] == 1
        assert _status(_program(smaller, fault), wrong) == 1


def test_what_is_not_finite_without_effect_is_left_out() -> None:
    smaller, _ = _smallest(_with_nan_after_its_keys(), _wrong(_times(2.0), _has_long))
    assert all(bool(side.isfinite().all()) for side in smaller.given["kv_cache"])


def test_requests_that_see_a_nan_are_not_what_is_wrong() -> None:
    arguments = decode_arguments(return_lse=True)
    arguments["kv_cache"][0][arguments["block_tables"][0, 0], :, 0] = torch.nan
    is_first = torch.tensor([True, False, False])

    def nan_in_first(**given: Any) -> Any:
        out, lse = references.trtllm_batch_decode_with_kv_cache(**given)
        return torch.where(is_first[:, None, None], torch.nan, out), torch.where(is_first[:, None], torch.nan, lse)

    call = RecordedCall(DECODE, arguments)
    with pytest.raises(RecordingError, match="is right, so that there is nothing to shrink"):
        _smallest(call, nan_in_first)
    assert _status(_program(call), nan_in_first) == 0


@pytest.mark.parametrize("is_of_contents", [False, True], ids=["wrong with any contents", "wrong with these contents"])
def test_synthetic_contents_hold_nothing_of_the_users(is_of_contents: bool, tmp_path: Path) -> None:
    """The contents are such as no normal distribution draws."""
    given = decode_arguments(sinks=SINKS)
    given |= {"query": given["query"] + 1000, "kv_cache": tuple(each + 1000 for each in given["kv_cache"])}
    call = RecordedCall(DECODE, given)
    wrong = _wrong(_times(2.0), lambda given: not is_of_contents or bool((given["query"] > 500).any()))
    smaller, fault = _smallest(call, wrong)
    assert ("query" in smaller.drawn, "kv_cache" in smaller.drawn) == (not is_of_contents, True)
    assert _status(_program(smaller, fault), wrong) == 1
    smaller, fault = _smallest(call, wrong, synthetic=True)
    write_repro(tmp_path, smaller, fault, {"GPU": "none"})
    program = _written(tmp_path)
    arguments = _arguments_of(program)
    assert all(float(each.abs().max()) < 10 for each in (arguments["query"], *arguments["kv_cache"]))
    assert not torch.equal(*arguments["kv_cache"])
    assert not any(each.is_floating_point() and each.numel() > 1 for each in program.saved.values())
    assert (fault is None) == is_of_contents
    assert _status(program, wrong) == int(not is_of_contents)


@pytest.mark.parametrize("end", [torch.AcceleratorError, KeyboardInterrupt])
def test_a_lost_gpu_or_ctrl_c_ends_the_search_with_what_was_found(
    end: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crashes(**arguments: Any) -> Any:
        if len(arguments["seq_lens"]) == 1:
            raise end("illegal memory access")
        return references.trtllm_batch_decode_with_kv_cache(**arguments) * 2

    smaller, fault = _smallest(decode(), crashes)
    assert fault is not None
    assert _facts(smaller)["requests"] == 2
    monkeypatch.setattr("lab.recorded.call.new_workspace", mock.Mock(side_effect=torch.AcceleratorError("lost")))
    with pytest.raises(RecordingError, match="cannot be shrunk: lost"):
        _smallest(decode(), crashes)


def test_selected_entries_are_left_out_unless_they_make_the_result_wrong() -> None:
    def expects_order(**arguments: Any) -> Any:
        table = arguments["block_tables"]
        ordered = torch.where(table.diff(prepend=table[..., :1]) < 0, -1, table)
        return references.trtllm_batch_decode_with_kv_cache_mla(**arguments | {"block_tables": ordered})

    smaller, fault = _smallest(CALLS["MLA, selected entries"], expects_order)
    assert fault is not None
    assert smaller.given["sparse_mla_top_k"] == 2
    first, second = smaller.given["block_tables"].flatten().tolist()
    assert first > second >= 0
    assert len(smaller.given["kv_cache"]) <= 2


def test_what_a_program_cannot_express_is_refused() -> None:
    with pytest.raises(RecordingError, match="cannot express kv_cache_sf yet"):
        _program(NVFP4)


def _without_bmm2_scale(**arguments: Any) -> Any:
    return references.trtllm_batch_decode_with_kv_cache(**arguments | {"bmm2_scale": 1.0})


def _not_zero_without_keys(**arguments: Any) -> Any:
    out = references.trtllm_batch_decode_with_kv_cache(**arguments)
    return torch.where((out == 0).all(dim=-1, keepdim=True), 0.01, out)


@pytest.mark.parametrize("options", ["", "--synthetic"])
@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (decode(bmm2_scale=2.0), _without_bmm2_scale),
        (CALLS["verify, window, more rows than keys"], _not_zero_without_keys),
    ],
)
def test_recorded_outputs_are_shrunk_without_a_call(
    call: RecordedCall, wrong: Callable[..., Any], options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = write_call(tmp_path / "dumps", DECODE.value, call.given, (wrong(**call.given),))
    assert run(f"recorded shrink {recording} --from-outputs --out {tmp_path}/repro {options}") == 0
    shown = capsys.readouterr().out
    assert ("holds recorded contents of query, kv_cache" in shown) != bool(options)
    assert ("is not known, because no call was made" in shown) == bool(options)
    text = (tmp_path / "repro" / "ISSUE.md").read_text()
    assert text.startswith("# a recorded call of trtllm_batch_decode_with_kv_cache: ")
    assert "The call was not made here: run `repro.py`." in text
    assert (f"of {DECODE.value}: the output is wrong (" in text) == (not options)
    assert ("Result of the recorded call: the output is wrong: " in text) == (not options)
    assert ("First elements of the worst vector, as recorded: request 0, " in text) == (not options)
    program = _written(tmp_path / "repro")
    assert len(program.text) < 20_000
    assert bool(program.saved) == (not options)
    assert f'"seq_lens": torch.tensor([{LENGTHS[0]}], ' in program.text  # the shortest request
    assert _status(program, wrong) == 1
    assert _status(program, references.trtllm_batch_decode_with_kv_cache) == 0


def _wrong_recording(folder: Path) -> Path:
    arguments = decode_arguments(bmm2_scale=2.0)
    right = references.trtllm_batch_decode_with_kv_cache(**arguments)
    return write_call(folder, DECODE.value, arguments, (right / 2,))


def test_the_command_shrinks_by_calling_and_writes_an_issue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernel.py").write_text(WRONG)
    line = f"recorded shrink {_wrong_recording(tmp_path / 'dumps')}#1 --out {tmp_path}/repro --device cpu"
    assert run(f"{line} --implementation {tmp_path}/kernel.py") == 0
    shown = capsys.readouterr().out
    assert "the output is wrong: 1 of 1 vectors" in shown
    assert "recorded contents" not in shown
    assert f"to call {tmp_path}/kernel.py, replace the import of {DECODE.value}" in shown
    text = (tmp_path / "repro" / "ISSUE.md").read_text()
    assert text.startswith(
        "# trtllm_batch_decode_with_kv_cache: the output is wrong (requests: 1, rows of each: 1, keys: 1)"
    )
    assert "The kernel of this call is `kernel.py`. `repro.py` calls FlashInfer, which may be right.\n" in text
    assert "    bmm2_scale=2.0,\n" in text
    assert "    query=bfloat16 [1, 1, 64],\n" in text
    assert "\nResult of this call: the output is wrong: 1 of 1 vectors" in text
    assert "First elements of the worst vector: request 0, row 0, head 0: expected in float64 " in text
    assert f"* torch: {torch.__version__.split('+')[0]}" in text
    assert "/repro" not in text


def test_an_issue_names_the_version_of_the_called_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys_kernels").mkdir()
    (tmp_path / "somebodys_kernels" / "__init__.py").write_text(f"__version__ = '7.8.9'\n{WRONG}")
    monkeypatch.syspath_prepend(tmp_path)
    line = f"recorded shrink {_wrong_recording(tmp_path / 'dumps')}#1 --out {tmp_path}/repro --device cpu"
    assert run(f"{line} --implementation somebodys_kernels") == 0
    assert "* somebodys_kernels: 7.8.9\n" in (tmp_path / "repro" / "ISSUE.md").read_text()


def test_a_call_in_the_labs_own_form_is_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its versions name packages that are not installed, and it may have no GPU."""
    module = ModuleType("an_engines_kernels")
    vars(module)[DECODE.value] = _without_bmm2_scale
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("lab.recorded.own_form.version_of", lambda package: {"torch": "2.11.0 (a build)"}.get(package))
    with Recorder(tmp_path / "calls", triggers=Triggers(shadow=1), functions=[module]):
        getattr(module, DECODE.value)(**decode_arguments(bmm2_scale=2.0))
    assert run(f"recorded shrink {tmp_path}/calls#1 --from-outputs --out {tmp_path}/repro") == 0
    text = (tmp_path / "repro" / "ISSUE.md").read_text()
    assert "\n* GPU: (please fill in)\n* torch: 2.11.0\n" in text
    assert text.startswith(f"# a recorded call of {DECODE.value}: the output is wrong")
    assert f"The engine called `{__name__}`. The call was not made here: run `repro.py`." in text


def test_no_module_that_only_a_file_names_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python finds it in the folder in which the command is given, which may be the recording's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("engine.py").write_text("from pathlib import Path\nPath('was_run').touch()\n" + WRONG)
    arguments = decode_arguments(bmm2_scale=2.0)
    call = RecordedCall(DECODE, arguments, _without_bmm2_scale(**arguments), module="engine", time="1", number=1)
    own_form.write(tmp_path, call)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("lab.commands.recorded.load", lambda name: {"flashinfer.decode": references}[name])
    assert run("recorded shrink .#1 --device cpu") == 2
    assert "there is nothing to shrink: the engine called engine" in capsys.readouterr().err
    assert not Path("was_run").exists()


def test_the_error_that_an_engines_call_raised_is_in_the_issue_and_no_name_is_code(tmp_path: Path) -> None:
    name = 'a"""; raise SystemExit(9)\n"""\\'
    call = replace(decode(), raised=f"{name}: launch failed", module="flashinfer.decode")
    fault = recorded_fault(call)
    assert fault is not None
    assert fault.sentence.endswith(": launch failed")
    write_repro(tmp_path, call, fault, {})
    program = ast.parse((tmp_path / "repro.py").read_text())
    assert name.replace("\n", " ") in str(ast.get_docstring(program))
    assert name in {node.value for node in ast.walk(program) if isinstance(node, ast.Constant)}
    text = (tmp_path / "ISSUE.md").read_text()
    assert "launch failed" in text
    assert "which may be right" not in text


def test_the_program_runs_alone(tmp_path: Path) -> None:
    write_repro(tmp_path, decode(bmm2_scale=2.0), Fault(Reason.OUTPUT, ""), {})
    assert (tmp_path / "repro.pt").exists()
    (package := tmp_path / "flashinfer").mkdir()
    (package / "__init__.py").write_text("__version__ = '0'")
    (package / "decode.py").write_text(WRONG)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    command = [sys.executable, str(tmp_path / "repro.py"), "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1
    assert "WRONG: 12 of 12 vectors" in done.stdout
    assert "row 0: relative L2 error of each head [" in done.stdout


def test_the_program_says_that_the_call_is_right_or_was_not_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = _program(decode(bmm2_scale=2.0))
    assert _status(program, references.trtllm_batch_decode_with_kv_cache) == 0
    assert capsys.readouterr().out.endswith("right\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _status(program, _without_bmm2_scale, words=()) == 2
    assert capsys.readouterr().out == "not run: there is no GPU\n"
    assert _status(program, None) == 2
    assert capsys.readouterr().out.startswith("not run: FlashInfer cannot be imported: import of flashinfer")


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        pytest.param(
            "", 125, "FlashInfer's functions need a GPU, and there is none here: --implementation names", marks=no_gpu
        ),
        ("--implementation lab.references --device cpu", 2, "is right, so that there is nothing to shrink"),
        ("--implementation lab.gpus --device cpu", 2, "lab.gpus has no trtllm_batch_decode_with_kv_cache"),
        ("--implementation nowhere --device cpu", 2, "nowhere cannot be imported"),
        (
            "--implementation kernel.py --device cpu",
            2,
            "the recorded call returned, but here it raises RuntimeError: out of order",
        ),
    ],
)
def test_the_command_refuses_in_a_sentence(
    options: str,
    status: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recording = _wrong_recording(tmp_path / "dumps")
    monkeypatch.chdir(tmp_path)
    raises = f"def {DECODE.value}(**_):\n    raise RuntimeError('out of order')\n"
    Path("kernel.py").write_text(raises)
    assert run(f"recorded shrink {recording}#1 --out {tmp_path}/repro {options}") == status
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "repro").exists()


def test_a_recording_of_several_calls_needs_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = next(_wrong_recording(tmp_path).iterdir())
    (tmp_path / first.name.replace("0001", "0002")).symlink_to(first)
    assert run(f"recorded shrink {tmp_path} --from-outputs --out {tmp_path}/repro") == 2
    assert f"{tmp_path} has 2 calls: name one, such as {tmp_path}#1" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_an_error_is_the_fault_only_if_the_recorded_call_raised_it(
    error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(**_: Any) -> Any:
        raise error("too long")

    def status(fault: Fault | None, out: Tensor | None = SINKS) -> tuple[int, str]:
        return _status(_program(replace(decode(), out=out), fault), raises), capsys.readouterr().out

    not_run, wrong = (2, f"not run: {error.__name__}: too long\n"), (1, f"WRONG: {error.__name__}: too long\n")
    assert status(None) == status(Fault(Reason.OUTPUT, "")) == not_run
    assert status(Fault(Reason.RAISED, "", "ValueError")) == (wrong if error is ValueError else not_run)
    assert status(Fault(Reason.NO_RETURN, ""), None) == status(None, None) == wrong


def test_an_issue_of_a_right_call_says_so(tmp_path: Path) -> None:
    write_repro(tmp_path, decode(bmm2_scale=2.0), None, {}, "flashinfer.decode")
    right = (tmp_path / "ISSUE.md").read_text()
    assert ": right with drawn contents (" in right
    assert "got" not in right


def test_a_vector_is_named_by_its_rows_in_the_whole_call() -> None:
    arguments = decode_arguments()
    arguments["kv_cache"][0][arguments["block_tables"][0, 0], :, 0] = torch.nan
    call = RecordedCall(DECODE, arguments)
    out = references.trtllm_batch_decode_with_kv_cache(**arguments)
    out[2, 3] *= 2
    fault = fault_of(call, out, None)
    assert fault is not None
    assert fault.vector.startswith("request 2, row 2, head 3: expected in float64 ")


def test_a_call_that_did_not_return_is_kept_whole_without_a_call(tmp_path: Path) -> None:
    call = decode()
    kept, fault = shrunk(call, recorded_fault)
    assert kept is call
    assert fault is not None
    assert fault.reason is Reason.NO_RETURN
    write_repro(tmp_path, kept, fault, {})
    text = (tmp_path / "ISSUE.md").read_text()
    assert text.startswith(f"# a recorded call of {DECODE.value}: the call did not return (requests: 3, ")
    assert "The call was not made here: run `repro.py`." in text
