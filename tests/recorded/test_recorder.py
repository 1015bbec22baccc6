"""Calls are recorded wherever an engine imported the function; triggers choose calls; an idle recorder does nothing."""

import contextlib
import functools
import importlib
import itertools
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lab import references
from lab.calls.problem import E4M3
from lab.checks import Outcome
from lab.recorded import Recorder, Triggers, recorded_cases
from lab.recorded import recorder as recorder_module
from tests.cases import BATCHES, CONTEXT, DECODE, MLA, RAGGED, arguments_of
from tests.devices import Operations
from tests.recorded.fake_kernels import Engine, decode_kernel, outcomes
from tests.recorded.record_calls import decode_arguments, latent_arguments

HOMES = {DECODE: "decode", CONTEXT: "prefill", MLA: "mla._core", RAGGED: "prefill"}
ALIASES = {MLA: ("mla", "decode")}


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """FlashInfer, with kernels that run on a CPU; engines are imported anew."""
    package = pytest.importorskip("flashinfer")
    for function, home in HOMES.items():
        kernel = getattr(references, function)
        fake = functools.wraps(kernel)(lambda *args, _kernel=kernel, **kwargs: _kernel(*args, **kwargs))
        for name in (home, *ALIASES.get(function, ())):
            monkeypatch.setattr(importlib.import_module(f"flashinfer.{name}"), function, fake)
    monkeypatch.delitem(sys.modules, "tests.recorded.engines", raising=False)
    yield package
    sys.modules.pop("tests.recorded.engines", None)


def _engines() -> ModuleType:
    return importlib.import_module("tests.recorded.engines")


LAYER = SimpleNamespace(layer_id=5)
NAMED = SimpleNamespace(layer_name="model.layers.7.self_attn.attn")


def _run_engines() -> None:
    sglang, vllm = _engines().SGLang(), _engines().VLLM()
    arguments = {name: arguments_of(name, BATCHES[name]([3, 3], [20, 37])) for name in BATCHES}
    sglang.forward_decode(LAYER, **arguments[DECODE])
    sglang.forward_mla(LAYER, **arguments[MLA])
    sglang.forward_ragged(LAYER, **arguments[RAGGED])
    vllm.forward_decode(NAMED, **arguments[DECODE])
    vllm.forward_prefill(NAMED, **arguments[CONTEXT])
    vllm.forward_mla(NAMED, **arguments[MLA])


@pytest.mark.parametrize("imported", ["before", "after"])
def test_calls_of_sglang_and_vllm_are_recorded_wherever_they_import_the_functions(
    flashinfer: ModuleType, tmp_path: Path, imported: str
) -> None:
    if imported == "before":
        _engines()
    originals = (
        flashinfer.decode.trtllm_batch_decode_with_kv_cache,
        flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla,
    )
    with Recorder(tmp_path) as recorder:
        _run_engines()
    cases = recorded_cases(tmp_path)
    assert [case.interface.value for case in cases] == [DECODE, MLA, RAGGED, DECODE, CONTEXT, MLA]
    assert [case.layer for case in cases] == [5, 5, 5, 7, 7, 7]
    assert outcomes(tmp_path) == [Outcome.RIGHT] * 6
    assert flashinfer.decode.trtllm_batch_decode_with_kv_cache is originals[0]
    assert _engines().trtllm_batch_decode_with_kv_cache is originals[0]
    assert flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla is originals[1]
    _run_engines()
    assert recorder.kept == 6


def test_a_package_that_nothing_has_imported_is_recorded_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "later_kernels"
    package.mkdir()
    (package / "__init__.py").write_text(f"from later_kernels.core import {DECODE} as decode, {DECODE}")
    (package / "core.py").write_text(
        f"from lab import references\n\ndef {DECODE}(**a):\n    return references.{DECODE}(**a)"
    )
    (tmp_path / "later_engine.py").write_text("from later_kernels import decode")
    (tmp_path / "later_kernels_of_others.py").write_text(f"def {DECODE}(**a):\n    return 3")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("later_kernels", "later_kernels.core", "later_engine", "later_kernels_of_others")
    try:
        with Recorder(tmp_path / "calls", functions=["later_kernels"]) as recorder:
            engine, others = importlib.import_module("later_engine"), importlib.import_module("later_kernels_of_others")
            engine.decode(**decode_arguments())
            assert getattr(others, DECODE)() == 3
            assert recorder.kept == 1
        engine.decode(**decode_arguments())
        assert recorder.kept == 1
        assert engine.decode is getattr(sys.modules["later_kernels.core"], DECODE)
        assert not hasattr(engine.decode, "__wrapped__")
    finally:
        for name in names:
            sys.modules.pop(name, None)


def test_a_call_that_a_recorded_call_makes_is_not_recorded_again(engine: Engine) -> None:
    with Recorder(engine.folder, functions=[engine.module, references]) as recorder:
        engine.decode()
    assert recorder.kept == 1


def test_results_are_those_that_were_written_or_returned(engine: Engine) -> None:
    engine.use(lambda out, **_: [out.fill_(3), None][1])
    setattr(engine.module, MLA, lambda **arguments: (torch.ones(2), torch.full((2,), 4.0)))
    with engine.recorded():
        engine.decode(out=torch.zeros(3, 4, 64))
        getattr(engine.module, MLA)(**latent_arguments())
    first, second = (case.read() for case in recorded_cases(engine.folder))
    assert first.out is not None
    assert first.out.unique().tolist() == [3]
    assert second.lse is not None
    assert second.lse.tolist() == [4, 4]


def test_arguments_that_the_call_overwrites_are_recorded_as_they_were(engine: Engine) -> None:
    arguments = decode_arguments()
    arguments["out"] = arguments["query"]
    before = arguments["query"].clone()
    with engine.recorded():
        engine.decode(**arguments)
    call = recorded_cases(engine.folder)[0].read()
    assert torch.equal(call.given["query"], before)
    assert call.out is not None
    assert torch.equal(call.out, arguments["query"])
    assert not torch.equal(call.out, before)


@pytest.mark.parametrize("changes", [{}, {"max_seq_len": 4}], ids=["returns", "raises"])
def test_a_call_that_overwrites_what_cannot_be_copied_is_not_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    arguments = decode_arguments(**changes)
    arguments["out"] = arguments["query"]
    monkeypatch.setattr(torch, "clone", mock.Mock(side_effect=torch.OutOfMemoryError("full")))
    refused = pytest.raises(ValueError, match="max_seq_len") if changes else contextlib.nullcontext()
    with engine.recorded() as recorder, refused:
        assert engine.decode(**arguments) is arguments["out"]
    assert recorder.kept == 0
    assert engine.log.messages == ["lab record: a call is not recorded: OutOfMemoryError: full"]


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of the recorded calls among those of the process, in the order of time."""
    return [int(path.stem.rpartition("call")[2]) for path in sorted(folder.glob("*.call"))]


def _of_layer(engine: Engine, number: int) -> None:
    layer = SimpleNamespace(layer_idx=number)
    assert layer is not None
    engine.decode(max_seq_len=50)


@pytest.mark.parametrize(
    ("triggers", "kept"),
    [
        (Triggers(), [1, 2, 3, 4, 5, 6]),
        (Triggers(layers=(1,)), [2, 4, 6]),
        (Triggers(longest=33), [1, 2, 3, 4, 5, 6]),
        (Triggers(longest=34), []),
        (Triggers(longest=100), []),
        (Triggers(from_s=3.5), [4, 5, 6]),
        (Triggers(until_s=3.5), [1, 2, 3]),
    ],
    ids=str,
)
def test_triggers_choose_calls(
    engine: Engine, triggers: Triggers, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()  # one second for the start, and one for each call
    monkeypatch.setattr(recorder_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))

    with engine.recorded(triggers=triggers) as recorder:
        for number in range(6):
            _of_layer(engine, number % 2)
    assert _numbers(engine.folder) == kept
    assert recorder.kept == len(kept)


@pytest.mark.parametrize("name", ["every", "shadow"])
def test_one_of_each_ten_calls_is_chosen_and_over_time_of_each_layer(engine: Engine, name: str) -> None:
    """Of 40 layers each 10th call would be of four layers alone; and a draft of four steps has a period of its own."""
    engine.use(decode_kernel(1.5))
    triggers = Triggers(layers=(*range(4),), **{name: 4})  # type: ignore[arg-type]
    with engine.recorded(triggers=triggers) as recorder:
        for number in range(40):
            _of_layer(engine, number % 4)
    places = [divmod(number - 1, 4) for number in _numbers(engine.folder)]
    assert [turn for turn, _ in places] == [*range(10)]
    assert {layer for _, layer in places} == {0, 1, 2, 3}
    assert recorder.summary().startswith(f"10 of 40 calls recorded in {engine.folder}")


@pytest.mark.parametrize(("every", "shadow"), [(0, 0), (1, -1)])
def test_counts_that_make_no_sense_are_refused(every: int, shadow: int) -> None:
    with pytest.raises(ValueError, match=f"every={every} must be at least 1, and shadow={shadow} at least 0"):
        Triggers(every, shadow=shadow)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("bad", [True, False])
def test_a_non_finite_output_is_kept(engine: Engine, bad: bool, dtype: torch.dtype) -> None:
    out, lse = torch.ones(3, 4, 64), torch.full((3, 4), -torch.inf)  # an LSE of rows that see no key
    out[1, 2, 3] = torch.nan if bad else 1
    engine.use(lambda **_: (out.to(dtype), lse))
    with engine.recorded(triggers=Triggers(non_finite=True)) as recorder:
        engine.decode()
    assert recorder.kept == bad


def test_shadow_keeps_wrong_calls_alone_and_logs_why(engine: Engine) -> None:
    right, wrong = decode_kernel(), decode_kernel(1.5)
    kernels = iter([right, wrong, right, wrong, right, right])
    engine.use(lambda **arguments: next(kernels)(**arguments))
    with engine.recorded(triggers=Triggers(shadow=1)) as recorder:
        for _ in range(6):
            engine.decode(out=torch.zeros(3, 4, 64, dtype=torch.float16))
    assert (recorder.judged, recorder.wrong, recorder.kept) == ([1, 2, 3, 4, 5, 6], [2, 4], 2)
    assert outcomes(engine.folder) == [Outcome.WRONG] * 2
    assert f"call 2, {DECODE}: the output is wrong: 12 of 12 vectors are wrong" in engine.log.messages[0]
    assert len(engine.log.messages) == 2


def test_shadow_judges_the_lse_that_the_call_wrote(engine: Engine) -> None:
    def replacement(lse: torch.Tensor, **arguments: Any) -> Any:
        out, right = references.trtllm_batch_decode_with_kv_cache(**arguments)
        return out, lse.copy_(right + 1)

    engine.use(replacement)
    with engine.recorded(triggers=Triggers(shadow=1)) as recorder:
        engine.decode(return_lse=True, lse=torch.zeros(3, 4))
    assert recorder.wrong == [1]


def test_shadow_has_the_bound_of_e4m3_arithmetic_where_it_is_chosen(engine: Engine) -> None:
    engine.use(decode_kernel(1.03))
    arguments = decode_arguments()
    arguments["kv_cache"] = tuple(each.to(E4M3) for each in arguments["kv_cache"])
    wrongs = []
    for is_rounded in (False, True):
        triggers = Triggers(shadow=1, e4m3_arithmetic=is_rounded)
        with engine.recorded(triggers=triggers) as recorder:
            engine.decode(**arguments)
        wrongs.append(recorder.wrong)
    assert wrongs == [[1], []]
    assert recorder.summary() == f"none of 1 call recorded in {engine.folder}; 1 judged, 0 wrong"


def test_shadow_keeps_invalid_calls_and_leaves_those_that_the_lab_does_not_model(engine: Engine) -> None:
    engine.use(lambda query, **_: query)
    table = decode_arguments()["block_tables"]
    table[0, 0] = 77
    with engine.recorded(triggers=Triggers(shadow=1)) as recorder:
        engine.decode(block_tables=table)
        engine.decode(backend="cake")
        engine.decode(backend="cake")
    assert (recorder.judged, recorder.wrong, recorder.kept) == ([1, 2, 3], [1], 1)
    first, second = engine.log.messages
    assert f"call 1, {DECODE}: the arguments are invalid: block_tables: K page id 77" in first
    assert "is not judged: backend='cake'" in second


def test_a_call_that_raises_keeps_its_inputs_and_its_error(engine: Engine) -> None:
    def fails(**_: Any) -> None:
        raise RuntimeError("launch failed")

    engine.use(fails)
    with engine.recorded(triggers=Triggers(shadow=1)) as recorder:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="launch failed"):
                engine.decode()
    assert recorder.kept == 2
    call = recorded_cases(engine.folder)[0].read()
    assert (call.out, call.raised, call.module) == (None, "RuntimeError: launch failed", __name__)
    assert outcomes(engine.folder) == [Outcome.FAILED] * 2


def test_inputs_are_on_the_disk_before_the_call(engine: Engine) -> None:
    kernel, seen = decode_kernel(), []

    def replacement(**arguments: Any) -> Any:
        seen.append(recorded_cases(engine.folder)[-1].read().out)
        return kernel(**arguments)

    engine.use(replacement)
    with engine.recorded(before=True) as recorder:
        engine.decode()
        engine.decode()
    assert seen == [None, None]
    assert (recorder.kept, outcomes(engine.folder)) == (2, [Outcome.RIGHT] * 2)
    kept = engine.folder / "unkept"
    engine.use(kernel)
    with Recorder(kept, functions=[engine.module], before=True, triggers=Triggers(non_finite=True)):
        engine.decode()
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize("limit", [{"most_calls": 2}, {"most_bytes": 100_000}])
def test_a_limit_ends_the_recording_with_one_sentence(engine: Engine, limit: dict[str, int]) -> None:
    with engine.recorded(**limit) as recorder:  # type: ignore[arg-type]
        for _ in range(5):
            engine.decode()
    assert (recorder.kept, recorder.has_ended) == (2, True)
    assert recorder.kept_bytes == sum(path.stat().st_size for path in engine.folder.glob("*.call"))
    (sentence,) = engine.log.messages
    assert f"2 calls of {recorder.kept_bytes / 1e9:.3g} GB are recorded, which is the limit" in sentence


def test_a_file_that_cannot_be_written_ends_the_recording_and_not_the_engine(engine: Engine) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with engine.recorded() as recorder:
            assert all(engine.decode().shape == (3, 4, 64) for _ in range(3))
            assert recorder.has_ended
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (sentence,) = engine.log.messages
    assert "File too large" in sentence
    assert "File too large" in recorder.summary()
    assert list(engine.folder.iterdir()) == []


def test_an_error_of_the_recorder_is_logged_once_and_not_raised(engine: Engine) -> None:
    engine.use(lambda **_: torch.ones(1))
    with engine.recorded() as recorder:
        for _ in range(2):
            engine.kernel(query=torch.ones(2), block_tables="none")
        engine.kernel(**decode_arguments(block_tables=torch.ones(3, 1, 4)))
    assert recorder.kept == 0
    first, second = engine.log.messages
    assert f"the recorded call of {DECODE} lacks kv_cache, seq_lens, max_seq_len" in first
    assert "block_tables of shape [3, 1, 4] are no page tables" in second


def test_a_value_that_no_file_holds_does_not_stop_the_engine(engine: Engine) -> None:
    engine.use(lambda query, **_: query.clone())
    with engine.recorded():
        assert engine.decode(max_seq_len=10**5000).shape == (3, 4, 64)
    (sentence,) = engine.log.messages
    assert "a call is not recorded: ValueError: Exceeds the limit" in sentence
    assert list(engine.folder.iterdir()) == []


def test_no_more_than_some_sentences_are_logged(engine: Engine) -> None:
    engine.use(lambda **_: None)
    with engine.recorded():
        for _ in range(recorder_module.MOST_LOGGED + 5):
            engine.decode()
    assert "a call is not recorded: AssertionError: call 1 returned no output" in engine.log.messages[0]
    assert len(engine.log.messages) == recorder_module.MOST_LOGGED


def test_calls_of_several_threads_are_all_recorded(engine: Engine) -> None:
    with engine.recorded() as recorder:
        threads = [threading.Thread(target=lambda: [engine.decode() for _ in range(8)]) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert recorder.kept == 32
    assert sorted(_numbers(engine.folder)) == [*range(1, 33)]


@pytest.mark.parametrize(
    "triggers", [Triggers(every=1000), Triggers(layers=(9,)), Triggers(from_s=1000, non_finite=True)]
)
def test_an_idle_recorder_runs_no_operation(engine: Engine, triggers: Triggers) -> None:
    arguments = decode_arguments()
    engine.use(lambda **_: arguments["query"])
    with engine.recorded(triggers=triggers), Operations() as operations:
        for _ in range(20):
            engine.kernel(**arguments)
    assert operations.names == []


def test_traced_code_is_traced_as_without_the_recorder(engine: Engine) -> None:
    engine.use(lambda query, **_: query * 2)

    def layer(query: torch.Tensor) -> torch.Tensor:
        return engine.kernel(query=query, kv_cache=None) + 1

    with engine.recorded() as recorder:
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
    assert recorder.kept == 0


def test_recorders_may_be_nested(engine: Engine) -> None:
    kernel = engine.kernel
    with Recorder(engine.folder / "1", functions=[engine.module]) as outer:
        with Recorder(engine.folder / "2", functions=[engine.module]) as inner:
            engine.decode()
        engine.decode()
    assert (outer.kept, inner.kept) == (2, 1)
    assert engine.kernel is kernel
