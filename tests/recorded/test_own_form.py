"""A call in the lab's own form holds what the call reads, and is read as it was made."""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
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
from tests.cases import BATCHES, DECODE, MLA, arguments_of, latent_batch, mirrors, random_batch, sparse_arguments
from tests.damage import damaged_values
from tests.recorded.record_calls import decode_arguments

ABOUT = {"time": "20261126_101112_131415", "number": 7, "layer": None}
VERSIONS = {"flashinfer": "0.7.2"}
DESCRIPTION_BYTES = 1000  # of a file at most: names, shapes, strides and versions


class _LocalText(str):
    """A class that the process that reads does not have."""

    def __str__(self) -> str:
        return f"text {self!r}"


def _write(folder: Path, arguments: dict[str, Any], function: str = DECODE, **about: Any) -> Path:
    """Write a call with its results, as the references return them."""
    returned = getattr(references, function)(**arguments)
    out, lse = returned if isinstance(returned, tuple) else (returned, None)
    folder.mkdir(exist_ok=True)
    return _write_inputs(folder, arguments, function, out=out, lse=lse, **about)


def _write_inputs(folder: Path, arguments: dict[str, Any], function: str = DECODE, **about: Any) -> Path:
    return own_form.write(folder, RecordedCall(AttentionCall(function), arguments, versions=VERSIONS, **ABOUT | about))


def _verdicts(recording: Path | str, **settings: Any) -> tuple[CaseVerdict, ...]:
    return judge_calls(recording, device="cpu", isolated=False, **settings).verdicts


def _outcomes(recording: Path | str, **settings: Any) -> list[Outcome]:
    return [verdict.outcome for verdict in _verdicts(recording, **settings)]


@pytest.mark.parametrize("options", [{}, {"width": 9}, {"lens": [2, 1, 3, 4]}])
def test_of_selected_entries_the_pages_are_kept_and_judged_from_the_calls_own_entries(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    batch = latent_batch([2, 2], [40, 100])
    columns = [[0, 3, 17, 1], [2, 38, 4, 0], [1, 80, 33, 2], [99, 0, 98, 50]]
    arguments = sparse_arguments(batch, columns, 16, out=None, **options)
    path = _write(tmp_path, arguments, MLA)
    call = own_form.read(path)
    used = options.get("lens", [4] * 4)
    places = arguments["block_tables"].flatten(0, 1)
    live = {int(place) // 16 for row, count in zip(places, used, strict=True) for place in row[:count]}
    assert call.pages is not None
    assert set(call.pages) >= live
    assert len(call.pages) < len(arguments["kv_cache"])
    new = call.given["block_tables"]
    assert (new.stride(), new.dtype) == (arguments["block_tables"].stride(), torch.int32)
    for row, count in enumerate(used):
        for old, place in zip(places[row][:count].tolist(), new.flatten(0, 1)[row][:count].tolist(), strict=True):
            assert (call.pages[place // 16], place % 16) == divmod(old, 16)
    assert _outcomes(tmp_path) == [Outcome.RIGHT]
    assert _outcomes(tmp_path, implementation=references) == [Outcome.RIGHT]
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    returned = references.trtllm_batch_decode_with_kv_cache_mla(**arguments)[0] * 1.1
    _write_inputs(wrong, arguments, MLA, out=returned)
    assert _outcomes(wrong) == [Outcome.WRONG]
    with pytest.raises(RecordingError, match="nothing to shrink"):
        shrunk(call, recorded_fault)


@pytest.mark.parametrize("function", BATCHES)
def test_a_call_of_each_function_is_read_as_it_was_and_is_right(tmp_path: Path, function: str) -> None:
    """By its output, and by a call of its inputs. Which pages are kept is tested below."""
    batch = BATCHES[function]([3, 3], [20, 37])
    arguments = arguments_of(function, batch) | (
        mirrors(batch) if function == "trtllm_ragged_attention_deepseek" else {}
    )
    call = own_form.read(_write(tmp_path, arguments, function))
    assert call.function.value == function
    assert call.given.keys() == arguments.keys()
    for name, value in arguments.items():
        if name.startswith(own_form.POOL) or name in (*own_form.UNKEPT, "block_tables"):
            continue
        if isinstance(value, torch.Tensor):
            assert torch.equal(call.given[name], value), name
            assert (call.given[name].stride(), call.given[name].dtype) == (value.stride(), value.dtype)
        else:
            assert call.given[name] == value, name
    assert call.out is not None
    assert (call.gpu, call.versions, call.lost) == (own_form.gpu(), VERSIONS, ())
    assert _outcomes(tmp_path) == [Outcome.RIGHT]
    assert _outcomes(tmp_path, implementation=references) == [Outcome.RIGHT]


@pytest.mark.parametrize("function", BATCHES)
def test_a_file_has_a_short_description_besides_its_data(tmp_path: Path, function: str) -> None:
    """docs/debug.md states the size of the description."""
    path = _write(tmp_path, arguments_of(function, BATCHES[function]([3, 3], [20, 370])), function)
    call = own_form.read(path)
    data_bytes = _size_bytes(call.out, call.lse, [value for name, value in call.given.items() if name not in UNKEPT])
    assert path.stat().st_size < data_bytes + DESCRIPTION_BYTES


def test_only_the_pages_that_are_read_are_kept_in_the_order_of_their_ids(tmp_path: Path) -> None:
    arguments = decode_arguments()
    arguments["block_tables"][0, 1], arguments["block_tables"][1, 2] = -1, 1000
    call = own_form.read(_write(tmp_path, arguments))
    tables, lengths = arguments["block_tables"], arguments["seq_lens"]
    read = [(request, column) for request in range(3) for column in range(-(-int(lengths[request]) // 16))]
    assert call.pages == tuple(sorted({int(tables[each]) for each in read}))
    for cache, whole in zip(call.given["kv_cache"], arguments["kv_cache"], strict=True):
        assert len(cache) == len(call.pages) < len(whole)
        assert cache.stride() == whole.stride()
        for each in read:
            page = int(call.given["block_tables"][each])
            assert torch.equal(cache[page], whole[tables[each]])  # with what follows the last token
            assert call.pages[page] == tables[each]
    unread = call.given["block_tables"][0]
    assert unread[1:].tolist() == [-1, 0]
    assert call.given["block_tables"][1, 2] == 1000


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


@pytest.mark.parametrize("ragged", [False, True])
def test_pages_before_the_window_are_not_kept(tmp_path: Path, ragged: bool) -> None:
    batch, widths = random_batch([3, 1] if ragged else [3, 3], [70, 50]), (0, 15, 16, 17, 40)
    for number, window_left in enumerate(widths):
        path = _write(tmp_path, arguments_of(DECODE, batch, window_left=window_left), number=number)
        first = [max(0, kv_len - 3 - window_left) // 16 for kv_len in (70, 50)]
        assert len(own_form.read(path).pages or ()) == 5 - first[0] + 4 - first[1], window_left
    assert _outcomes(tmp_path) == [Outcome.RIGHT] * len(widths)


def test_a_table_that_all_requests_share_is_read_by_each(tmp_path: Path) -> None:
    whole = decode_arguments()["block_tables"]
    _write(tmp_path, decode_arguments(block_tables=whole[2:].expand(3, 3)), number=1)
    path = _write(tmp_path, decode_arguments(block_tables=whole.repeat(1, 2)[:, :3]), number=2)
    assert _outcomes(tmp_path) == [Outcome.RIGHT] * 2
    assert own_form.read(path).given["block_tables"].stride() == (6, 1)


def test_separate_tables_of_k_and_v_and_the_layout_of_tokens_before_heads(tmp_path: Path) -> None:
    batch = random_batch([1, 1], [20, 37])
    _write(tmp_path, arguments_of(DECODE, batch, separate_tables=True), number=1)
    path = _write(tmp_path, arguments_of(DECODE, batch, kv_layout="NHD"), number=2)
    assert _outcomes(tmp_path) == [Outcome.RIGHT] * 2
    assert len(own_form.read(path).pages or ()) == 5


def test_one_tensor_of_k_and_v_and_the_scale_factors_of_nvfp4_are_cut_alike(tmp_path: Path) -> None:
    arguments = decode_arguments()
    pool = torch.stack(arguments["kv_cache"], dim=1)
    factors = torch.rand(9, 2, 2, 16, 4).to(E4M3)
    arguments |= {"kv_cache": pool, "kv_cache_sf": factors}
    _write_inputs(tmp_path, arguments)
    call = recorded_cases(tmp_path)[0].read()
    pages = list(call.pages or ())
    assert torch.equal(call.given["kv_cache"], pool[pages])
    assert torch.equal(call.given["kv_cache_sf"].view(torch.uint8), factors.view(torch.uint8)[pages])


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
        ([300, 999, 17, 512], (8, 2), 32, 128),
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


def test_both_forms_may_lie_in_one_folder(dumps: Path) -> None:
    _write(dumps, decode_arguments())
    assert [Path(case.path).suffix for case in recorded_cases(dumps)] == ["", "", "", "", "", own_form.SUFFIX]


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
    ],
)
def test_pages_that_share_memory_lose_their_strides(
    tmp_path: Path, heads: int, stride: tuple[int, ...], is_lost: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    pool = torch.randn(9 * 2048, generator=draw).to(torch.bfloat16).as_strided((9, heads, 16, 64), stride)
    call = own_form.read(_write(tmp_path, decode_arguments(kv_cache=(pool, pool))))
    own, _ = call.given["kv_cache"]
    assert torch.equal(own, pool[list(call.pages or ())])
    assert (own.stride() != stride) == bool(call.lost) == is_lost


def _size_bytes(*values: Any) -> int:
    """Return the size of the elements of all tensors in nested tuples and lists."""
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
    """Copy a call as the call with another number, and return the copy."""
    return Path(shutil.copy(call, folder / call.name.replace("call000007", f"call{number:06}")))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_one_sentence(one_call: Path, tmp_path: Path, damage: str) -> None:
    path = Path(shutil.copy(one_call, tmp_path))
    change, sentence = DAMAGES[damage]
    change(path)
    with pytest.raises(RecordingError, match=sentence) as error:
        own_form.read(path)
    assert "\n" not in str(error.value)


def test_a_damaged_file_is_declined(one_call: Path, tmp_path: Path) -> None:
    for number, (change, _) in enumerate(DAMAGES.values()):
        change(_copy(one_call, tmp_path, number))
    outcomes = dict(zip(DAMAGES, _outcomes(tmp_path), strict=True))
    assert outcomes == dict.fromkeys(DAMAGES, Outcome.DECLINED)


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


def test_pages_that_share_memory_between_gaps_are_kept_apart(tmp_path: Path) -> None:
    arguments = decode_arguments()
    shape = arguments["kv_cache"][0].shape
    _, num_heads, page_size, head_dim = shape
    stride = (
        page_size * head_dim // 2,
        10**6,
        head_dim,
        1,
    )  # of a head, each page begins in the middle of the one before
    pool = torch.zeros(num_heads * 10**6, dtype=torch.bfloat16).as_strided(shape, stride)
    call = own_form.read(_write_inputs(tmp_path, decode_arguments(kv_cache=(pool, pool))))
    assert call.lost == (own_form.OVERLAPPING,)
