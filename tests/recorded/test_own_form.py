"""A call in the lab's own form holds what the call reads, and is read as it was made."""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any
from zipfile import ZIP_LZMA, ZipFile

import numpy as np
import pytest
import torch

from lab import references
from lab.calls import AttentionCall
from lab.calls.problem import E4M3
from lab.checks import Outcome
from lab.checks.run.judge import judge_calls
from lab.checks.run.verdicts import CaseVerdict
from lab.recorded import own_form
from lab.recorded.call import ALIGNMENT_BYTES, RecordedCall, RecordingError, recorded_fault
from lab.recorded.case import recorded_cases
from lab.recorded.own_form import UNKEPT
from lab.recorded.shrink import shrunk
from tests.cases import DECODE, MLA, arguments_of, mirrors, ragged_batch, random_batch
from tests.damage import damaged_values
from tests.recorded.kinds import CALLS, NVFP4, RANKS, ragged
from tests.recorded.record_calls import decode_arguments
from tests.recorded.write_calls import same

ABOUT = {"time": "20261126_101112_131415", "number": 7, "layer": None}
VERSIONS = {"flashinfer": "0.7.2"}
DESCRIPTION_BYTES = 1000  # of a file at most: names, shapes, strides and versions


class _LocalText(str):
    """A class that the process that reads does not have."""

    def __str__(self) -> str:
        return f"text {self!r}"


def _write(folder: Path, arguments: Mapping[str, Any], function: str = DECODE, **about: Any) -> Path:
    returned = getattr(references, function)(**arguments)
    out, lse = returned if isinstance(returned, tuple) else (returned, None)
    folder.mkdir(exist_ok=True)
    return _write_inputs(folder, arguments, function, out=out, lse=lse, **about)


def _write_inputs(folder: Path, arguments: Mapping[str, Any], function: str = DECODE, **about: Any) -> Path:
    return own_form.write(folder, RecordedCall(AttentionCall(function), arguments, versions=VERSIONS, **ABOUT | about))


def _verdicts(recording: Path | str, **settings: Any) -> tuple[CaseVerdict, ...]:
    return judge_calls(recording, device="cpu", isolated=False, **settings).verdicts


KINDS = [*CALLS.values(), *RANKS.values(), NVFP4, ragged(**mirrors(ragged_batch([2, 3], [4, 6])))]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A folder with a call of each kind, and the files."""
    folder = tmp_path_factory.mktemp("kinds")
    calls = enumerate(KINDS, start=1)
    return folder, [_write(folder, call.arguments(), call.function.value, number=number) for number, call in calls]


@pytest.mark.parametrize("implementation", [None, references], ids=["by its output", "by a call of its inputs"])
def test_a_call_of_each_kind_is_right(recording: tuple[Path, list[Path]], implementation: Any) -> None:
    settings = {} if implementation is None else {"implementation": implementation}
    verdicts = _verdicts(recording[0], **settings)
    assert [verdict.reason for verdict in verdicts if verdict.outcome is not Outcome.RIGHT] == []
    assert len(verdicts) == len(KINDS)


@pytest.mark.parametrize("number", range(len(KINDS)), ids=lambda number: ([*CALLS, *RANKS, "NVFP4", "mirrors"])[number])
def test_a_call_of_each_kind_is_read_as_it_was(recording: tuple[Path, list[Path]], number: int) -> None:
    """docs/debug.md states the size of the description."""
    made, path = KINDS[number], recording[1][number]
    call = own_form.read(path)
    assert (call.function, call.given.keys()) == (made.function, made.given.keys())
    assert (call.gpu, call.versions, call.lost) == (own_form.gpu(), VERSIONS, ())
    pools = [name for name in made.given if name.startswith(own_form.POOL)]
    unkept = (*own_form.UNKEPT, *pools, "block_tables")
    assert all(same(call.given[name], value) for name, value in made.given.items() if name not in unkept)
    for name in pools:
        whole, kept = (each if isinstance(each, tuple) else (each,) for each in (made.given[name], call.given[name]))
        assert same(kept, tuple(_pages_of(side, call.pages) for side in whole))
    if pools:
        was, now = made.given["block_tables"], call.given["block_tables"]
        assert (now.dtype, now.stride()) == (was.dtype, was.stride() if all(was.stride()) else (3, 1))
    data_bytes = _size_bytes(call.out, call.lse, [value for name, value in call.given.items() if name not in UNKEPT])
    assert path.stat().st_size < data_bytes + DESCRIPTION_BYTES


def _pages_of(side: torch.Tensor, pages: tuple[int, ...] | None) -> torch.Tensor:
    assert pages is not None
    kept = torch.empty_strided((len(pages), *side.shape[1:]), side.stride(), dtype=side.dtype)
    for number, page in enumerate(pages):
        kept[number] = side[page]
    return kept


@pytest.mark.parametrize("kind", ["decode", "decode, NHD"])
def test_only_the_pages_that_are_read_are_kept_in_the_order_of_their_ids(tmp_path: Path, kind: str) -> None:
    arguments = CALLS[kind].arguments()
    arguments["block_tables"][0, 1], arguments["block_tables"][1, 2] = -1, 1000
    call = own_form.read(_write(tmp_path, arguments))
    tables, lengths = arguments["block_tables"], arguments["seq_lens"]
    read = [(request, column) for request in range(3) for column in range(-(-int(lengths[request]) // 16))]
    assert call.pages == tuple(sorted({int(tables[each]) for each in read}))
    assert [call.pages[call.given["block_tables"][each]] for each in read] == [tables[each] for each in read]
    assert call.given["block_tables"][0, 1:].tolist() == [-1, 0]
    assert call.given["block_tables"][1, 2] == 1000


def test_of_selected_entries_the_pages_are_kept_and_judged_from_the_calls_own_entries(tmp_path: Path) -> None:
    arguments = CALLS["MLA, numbers of selected entries"].given
    path = _write(tmp_path, arguments, MLA)
    call = own_form.read(path)
    assert call.pages == (0, 1, 3)  # of 4
    with pytest.raises(RecordingError, match="nothing to shrink"):
        shrunk(call, recorded_fault)
    _write_inputs(tmp_path, arguments, MLA, out=call.out * 1.1)
    (verdict,) = _verdicts(tmp_path)
    assert verdict.outcome is Outcome.WRONG


@pytest.mark.parametrize("wrong", [-3, 9, 99])
def test_a_page_outside_the_pool_survives(tmp_path: Path, wrong: int) -> None:
    arguments = decode_arguments()
    arguments["block_tables"][2, 1] = wrong
    _write_inputs(tmp_path, arguments)
    (verdict,) = _verdicts(tmp_path)
    assert f"K page id {wrong} of request 2, column 1 is outside the engine's pool, and" in verdict.reason


def test_a_length_beyond_the_table_survives(tmp_path: Path) -> None:
    arguments = decode_arguments(seq_lens=torch.tensor([5, 17, 49], dtype=torch.int32), max_seq_len=60)
    _write_inputs(tmp_path, arguments)
    (verdict,) = _verdicts(tmp_path)
    assert "seq_lens[2] = 49 needs 4 pages" in verdict.reason


@pytest.mark.parametrize("q_lens", [[3, 3], [3, 1]], ids=str)
def test_pages_before_the_window_are_not_kept(tmp_path: Path, q_lens: list[int]) -> None:
    batch, widths = random_batch(q_lens, [70, 50]), (0, 15, 16, 17, 40)
    for number, window_left in enumerate(widths):
        path = _write(tmp_path, arguments_of(DECODE, batch, window_left=window_left), number=number)
        first = [max(0, kv_len - 3 - window_left) // 16 for kv_len in (70, 50)]
        assert len(own_form.read(path).pages or ()) == 5 - first[0] + 4 - first[1], window_left
    assert [verdict.outcome for verdict in _verdicts(tmp_path)] == [Outcome.RIGHT] * len(widths)


def test_strides_gaps_and_alignment_are_kept_on_every_device(tmp_path: Path) -> None:
    wide = torch.randn(3, 4 * 64 + 2 * 64 + 8).to(torch.bfloat16)
    scales = torch.randn(9)
    arguments = decode_arguments(
        query=wide[:, 8 : 8 + 4 * 64].unflatten(1, (4, 64)),
        bmm1_scale=scales[3:4],
        out=torch.zeros(5, 4, 64, dtype=torch.bfloat16)[2:],
        sinks=torch.zeros(1).expand(4),
    )
    call = own_form.read(_write_inputs(tmp_path, arguments))
    for given in (call.given, call.arguments(torch.device("cpu"))):
        for name in ("query", "bmm1_scale", "out", "sinks"):
            was, now = arguments[name], given[name]
            assert now.stride() == was.stride(), name
            assert now.data_ptr() % ALIGNMENT_BYTES == was.data_ptr() % ALIGNMENT_BYTES, name
            assert name == "out" or torch.equal(now, was)
    assert bool(call.arguments()["out"].isnan().all())  # nothing is written there yet
    lost = RecordedCall(call.function, call.given, None, None, {}, ("alignment",)).arguments(torch.device("cpu"))
    assert [lost[name].data_ptr() % ALIGNMENT_BYTES for name in ("query", "out")] == [0, 0]


def test_contents_of_the_workspace_and_of_results_are_not_kept(tmp_path: Path) -> None:
    arguments = decode_arguments(
        workspace_buffer=torch.ones(2**20, dtype=torch.uint8),
        multi_ctas_kv_counter_buffer=torch.ones(2**20, dtype=torch.uint8),
        out=torch.ones(3, 4, 64, dtype=torch.bfloat16),
    )
    path = _write_inputs(tmp_path, arguments)
    assert path.stat().st_size < 2**19
    call = own_form.read(path)
    assert call.given["workspace_buffer"] is None
    assert call.out is None
    assert call.arguments()["workspace_buffer"] is None


@pytest.mark.parametrize("results", [{"out": torch.ones(3, 4, 64).int()}, {"lse": torch.ones(3, 4).int()}])
def test_results_of_integers_are_wrong(tmp_path: Path, results: dict[str, torch.Tensor]) -> None:
    right, lse = references.trtllm_batch_decode_with_kv_cache(**decode_arguments(return_lse=True))
    _write_inputs(tmp_path, decode_arguments(return_lse=True, **results), **{"out": right, "lse": lse} | results)
    (verdict,) = _verdicts(tmp_path)
    assert verdict.outcome is Outcome.WRONG, verdict.reason
    assert "int32" in verdict.reason


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (True, True),
        (torch.float16, torch.float16),
        ("auto", "auto"),
        (np.str_("auto"), "auto"),
        (_LocalText("auto"), "auto"),
        (AttentionCall.DECODE, AttentionCall.DECODE.value),
        ([1], [1]),
    ],
)
def test_plain_values_are_read_as_python_values(tmp_path: Path, value: Any, read: Any) -> None:
    path = _write_inputs(tmp_path, decode_arguments(backend=value))
    found = own_form.read(path).given["backend"]
    assert found == read
    assert type(found) is type(read)


def test_a_value_that_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    path = _write_inputs(tmp_path, decode_arguments(request_order_plan=object()))
    with pytest.raises(
        RecordingError, match="does not hold the value of request_order_plan, only that it is of type object"
    ):
        own_form.read(path)


@pytest.mark.parametrize(
    ("kv_lens", "heads", "page_size", "num_columns"),
    [
        ([16], (8, 1), 16, 9),  # one page of one K/V head, as on one of many GPUs
        ([100, 70, 31, 200], (8, 2), 16, 2**14),  # a server's table has columns for the model's longest context
    ],
)
def test_a_file_is_no_larger_than_what_the_call_reads_and_a_tenth(
    tmp_path: Path, kv_lens: list[int], heads: tuple[int, int], page_size: int, num_columns: int
) -> None:
    batch = random_batch([1] * len(kv_lens), kv_lens, heads=heads, head_dim=128)
    arguments = arguments_of(DECODE, batch, page_size=page_size, out_dtype=torch.bfloat16)
    spare = torch.zeros(500, heads[1], page_size, 128, dtype=torch.bfloat16)
    arguments["kv_cache"] = tuple(torch.cat((each, spare)) for each in arguments["kv_cache"])
    tables = arguments["block_tables"]
    arguments["block_tables"] = torch.randint(500, (len(kv_lens), num_columns), dtype=tables.dtype)
    arguments["block_tables"][:, : tables.shape[1]] = tables
    path = _write(tmp_path, arguments | {"out": torch.empty_like(arguments["query"])})
    num_pages = sum(-(-kv_len // page_size) for kv_len in kv_lens)
    read_bytes = num_pages * (2 * heads[1] * page_size * 128 * 2 + tables.itemsize)
    read_bytes += _size_bytes(arguments["query"], arguments["seq_lens"])
    written_bytes = arguments["query"].nbytes
    assert read_bytes < path.stat().st_size - written_bytes < 1.1 * read_bytes


def test_calls_are_in_the_order_of_time_with_their_layer_and_replay(tmp_path: Path) -> None:
    arguments = decode_arguments()
    for about in (
        {"time": "2_1", "number": 2},
        {"time": "2_2", "number": 1, "layer": 31, "replay": 12},
        {"time": "1_9"},
    ):
        _write(tmp_path, arguments, **about)
    (tmp_path / "notes.call").write_bytes(b"")
    cases = recorded_cases(tmp_path)
    assert [(case.number, case.time, case.layer, case.replay) for case in cases] == [
        (1, "1_9", None, 0),
        (2, "2_1", None, 0),
        (3, "2_2", 31, 12),
    ]
    assert [case.address for case in cases] == [f"{tmp_path}#{number}" for number in (1, 2, 3)]
    assert recorded_cases(f"{tmp_path}#3") == cases[2:]


def test_suspicions_name_the_pages_of_the_engine(tmp_path: Path) -> None:
    arguments = decode_arguments()
    last = arguments["block_tables"][1, 1] = arguments["block_tables"][2, 2]
    arguments["kv_cache"][0][arguments["block_tables"][0, 0], 0, 2, 0] = torch.nan
    arguments["kv_cache"][1][last, 1, 5, 0] = torch.inf
    _write_inputs(tmp_path, arguments, out=torch.full((3, 4, 64), torch.nan))
    (verdict,) = _verdicts(tmp_path)
    remarks = " ".join(verdict.judged.suspicions)
    assert f"page {last} is the last page of requests 1, 2" in remarks
    assert f"K of request 0, key 2 (page {arguments['block_tables'][0, 0]}, slot 2)" in remarks
    assert f"page {last} holds a non-finite V after the request's last key" in remarks


@pytest.mark.parametrize(
    ("heads", "stride", "is_lost"),
    [
        (2, (2048, 1024, 64, 1), False),
        (2, (2047, 1024, 64, 1), True),
        (2, (1024, 0, 64, 1), True),  # heads are one in memory
        (1, (1024, 1, 64, 1), False),  # a stride that no address depends on
        (2, (512, 10**6, 64, 1), True),  # of a head, each page begins in the middle of the one before
    ],
)
def test_pages_that_share_memory_lose_their_strides(
    tmp_path: Path, heads: int, stride: tuple[int, ...], is_lost: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    shape = (9, heads, 16, 64)
    size = 1 + sum((number - 1) * step for number, step in zip(shape, stride, strict=True))
    pool = torch.randn(size, generator=draw).to(torch.bfloat16).as_strided(shape, stride)
    call = own_form.read(_write(tmp_path, decode_arguments(kv_cache=(pool, pool))))
    own, _ = call.given["kv_cache"]
    assert torch.equal(own, pool[list(call.pages or ())])
    assert (own.stride() != stride) == bool(call.lost) == is_lost


def _size_bytes(*values: Any) -> int:
    parts = [_size_bytes(*each) if isinstance(each, tuple | list) else getattr(each, "nbytes", 0) for each in values]
    return sum(parts)


def _record(path: Path) -> Any:
    with ZipFile(path) as archive:
        return json.loads(archive.read(own_form.DESCRIPTION))


def _change(path: Path, record: Any = None, **changes: Any) -> None:
    """Replace the description of a call, or some of its values; changes of the tensors' elements are in the bytes `members`."""
    members = changes.pop("members", {})
    changed = (_record(path) if record is None else record) if not changes else _record(path) | changes
    with ZipFile(path) as archive:
        members = {name: archive.read(name) for name in own_form.MEMBERS} | members
    with ZipFile(path, "w") as archive:
        for name, content in (members | {own_form.DESCRIPTION: json.dumps(changed).encode()}).items():
            if content is not None:
                archive.writestr(name, content)


def _change_query(path: Path, **changes: Any) -> None:
    tensors = _record(path)["tensors"]
    _change(path, tensors=tensors | {"query": tensors["query"] | changes})


def _without_query(path: Path) -> None:
    tensors = _record(path)["tensors"]
    del tensors["query"]
    _change(path, tensors=tensors)


def _with_repeated_pages(path: Path) -> None:
    tensors = _record(path)["tensors"]
    _change(path, tensors=tensors | {"pages": tensors["pages"] | {"shape": [12], "stride": [0]}})


def _with_another_compression(path: Path) -> None:
    with ZipFile(path, "w", ZIP_LZMA) as archive:
        archive.writestr(own_form.DESCRIPTION, "{}" * 99)
    content = bytearray(path.read_bytes())
    content[48] = 1  # the first byte after LZMA's properties, always 0
    path.write_bytes(content)


def _with_a_wrong_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: path.write_bytes(b""), "is damaged"),
    "half": (lambda path: path.write_bytes(path.read_bytes()[:9000]), "is damaged"),
    "one wrong bit": (_with_a_wrong_byte, "is damaged: BadZipFile: Bad CRC-32 for file 'contents'"),
    "a file of torch, as an earlier version": (
        lambda path: torch.save({"version": 3}, path),
        "is no call that the lab recorded, or was recorded by an earlier release",
    ),
    "a later version": (lambda path: _change(path, version=5), "is of version 5; this release of the lab reads 4"),
    "an unknown function": (
        lambda path: _change(path, function="relu"),
        "holds a call of relu, and the lab does not read recordings of this function",
    ),
    "a call that is not recorded": (
        lambda path: _change(path, function=AttentionCall.DSV4_DECODE.value),
        "and the lab does not read recordings of this function",
    ),
    "contents that are cut off": (
        lambda path: _change(path, members={"contents": b"x"}),
        "is damaged: ValueError: query needs 1536 bytes, and the file has 1",
    ),
    "no contents": (lambda path: _change(path, members={"contents": None}), "is damaged"),
    "a tensor of a terabyte": (
        lambda path: _change_query(path, shape=[10**12], stride=[1]),
        "is damaged: ValueError: query needs 2000000000000 bytes, and the file has",  # nothing was allocated
    ),
    "a description of 16 MiB": (
        lambda path: _change(path, gpu=" " * own_form.MOST_DESCRIPTION_BYTES),
        "is damaged: ValueError: call.json has 1677",
    ),
    "another compression": (_with_another_compression, "is no call that the lab recorded"),
    "pages that repeat one": (_with_repeated_pages, "is damaged: ValueError: the ids of pages are not contiguous"),
    "strides of a terabyte": (lambda path: _change_query(path, stride=[10**12, 64, 1]), "is damaged"),
    "a tensor of another size": (lambda path: _change_query(path, shape=[3, 4, 65]), "is damaged"),
    "a tensor of another dtype": (lambda path: _change_query(path, dtype="float99"), "is damaged"),
    "a query without its layout": (_without_query, "does not hold the value of query, only that it is torch.Tensor"),
    "a name of two lines": (
        lambda path: _change(path, arguments={"colour\nlab: all is right": "red"}),
        "was recorded with colour lab: all is right, which",
    ),
}


@pytest.fixture(scope="module")
def one_call(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("own"), decode_arguments())


def _copy(call: Path, folder: Path, number: int) -> Path:
    return Path(shutil.copy(call, folder / call.name.replace("call000007", f"call{number:06}")))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_one_sentence(one_call: Path, tmp_path: Path, damage: str) -> None:
    path = Path(shutil.copy(one_call, tmp_path))
    change, sentence = DAMAGES[damage]
    change(path)
    with pytest.raises(RecordingError, match=sentence) as error:
        own_form.read(path)
    assert "\n" not in str(error.value)


def test_a_number_that_no_float_holds_is_refused(one_call: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(one_call, tmp_path))
    _change(path, arguments=_record(path)["arguments"] | {"bmm1_scale": 10**400})
    with pytest.raises(RecordingError, match="too large"):
        own_form.read(path).problem()


def test_changed_values_are_read_or_refused(one_call: Path, tmp_path: Path) -> None:
    record = _record(one_call)
    for number, changed in enumerate(damaged_values(record, random.Random(0), 100)):
        _change(path := _copy(one_call, tmp_path, number // 20), changed)  # the last of 20 is judged
        with contextlib.suppress(RecordingError):
            own_form.read(path)
    verdicts = _verdicts(tmp_path)
    assert len(verdicts) == 5
    assert not [each.reason for each in verdicts if "a part of the lab failed" in each.reason]


def test_a_layout_of_another_dtype_is_judged_or_refused(one_call: Path, tmp_path: Path) -> None:
    record = _record(one_call)
    dtypes = (torch.int16, torch.uint16, torch.bool, torch.int64, torch.float64, E4M3)
    names = ("query", "block_tables", "seq_lens", "kv_cache 0", "result out")
    for number, (dtype, name) in enumerate(product(dtypes, names)):
        layout = record["tensors"][name] | {"dtype": str(dtype).removeprefix("torch.")}
        changed = record | {"tensors": record["tensors"] | {name: layout}}
        members = {"contents": b"<" * 10**6, "numbers": bytes(10**6)}
        _change(_copy(one_call, tmp_path, number), changed, members=members)
    verdicts = _verdicts(tmp_path)
    assert len(verdicts) == len(dtypes) * len(names)
    for verdict in verdicts:
        assert "a part of the lab failed" not in verdict.reason, verdict.reason
        assert verdict.outcome is not Outcome.RIGHT, verdict.case


def test_a_pipe_in_the_place_of_a_call_is_refused(one_call: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / one_call.name)
    with pytest.raises(RecordingError, match="a pipe or a device, and no file"):
        own_form.read(tmp_path / one_call.name)
