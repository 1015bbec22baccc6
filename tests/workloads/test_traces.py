"""Traces as published, damaged ones, and batches drawn from them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.workloads.traces import (
    TracedRequest,
    read_azure,
    read_mooncake,
    read_trace,
    running_lengths,
    snapshot,
)

MOONCAKE_ROW = '{"timestamp": 7, "input_length": 5, "output_length": 6}'
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE_ROW = "2023-11-16 18:15:46.6805900,374,44"
TIME = "2023-11-16 18:15:47.0000000"


def test_running_lengths_count_the_prompt_and_what_was_generated() -> None:
    requests = [TracedRequest(0, 100, 10), TracedRequest(1000, 200, 40), TracedRequest(9000, 300, 5)]
    assert running_lengths(requests, 0, ms_per_token=50) == [100]
    assert running_lengths(requests, 499, ms_per_token=50) == [109]
    assert running_lengths(requests, 500, ms_per_token=50) == []
    assert running_lengths(requests, 2000, ms_per_token=50) == [220]


def test_a_snapshot_is_the_first_moment_with_enough_requests() -> None:
    requests = [TracedRequest(0, 100, 100), TracedRequest(2500, 200, 100)]
    assert snapshot(requests, 1, ms_per_token=50) == [100]
    with pytest.raises(ValueError, match="never 2 requests"):
        snapshot(requests, 2, ms_per_token=10)
    # The second comes at 2.5 s; at 3 s the first has generated 60 tokens, the second 10.
    assert snapshot(requests, 2, ms_per_token=50) == [160, 210]


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 9), st.integers(1, 200)), min_size=1, max_size=20),
    st.integers(1, 6),
    st.sampled_from((1.0, 50.0, 333.0)),
)
def test_a_snapshot_misses_no_earlier_second(
    rows: list[tuple[int, int, int]], batch_size: int, ms_per_token: float
) -> None:
    requests = [TracedRequest(*row) for row in sorted(rows)]
    moments = [running_lengths(requests, second * 1000.0, ms_per_token) for second in range(25)]
    enough = [lengths[:batch_size] for lengths in moments if len(lengths) >= batch_size]
    if enough:
        assert snapshot(requests, batch_size, ms_per_token) == enough[0]
    else:
        with pytest.raises(ValueError, match="run at once"):
            snapshot(requests, batch_size, ms_per_token)


def test_a_trace_in_absolute_time_costs_no_more() -> None:
    assert snapshot([TracedRequest(1.7e12, 100, 10)], 1) == [100]


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_snapshot_of_nothing_is_refused(batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size={batch_size} must be 1 or more"):
        snapshot([TracedRequest(0, 100, 10)], batch_size)


@pytest.mark.parametrize("pace", [0.0, -1.0, float("nan"), float("inf")])
def test_a_pace_that_is_none_is_refused(pace: float) -> None:
    with pytest.raises(ValueError, match=r"ms_per_token=.* must be finite and more than 0"):
        snapshot([TracedRequest(0, 100, 10)], 1, ms_per_token=pace)


def test_a_trace_of_nothing_has_no_snapshot() -> None:
    with pytest.raises(ValueError, match="never 1 requests"):
        snapshot([], 1)


def test_mooncake_needs_three_fields_and_reads_no_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [MOONCAKE_ROW, "", '{"timestamp": 7.5, "input_length": 8.0, "output_length": 9, "hash_ids": [0, 1]}']
    path.write_text("\n".join(rows))
    assert read_mooncake(path) == [TracedRequest(7.0, 5, 6), TracedRequest(7.5, 8, 9)]
    assert isinstance(read_mooncake(path)[1].input_length, int)


def mooncake_row(timestamp: str = "9", input_length: str = "5", output_length: str = "5") -> str:
    return f'{{"timestamp": {timestamp}, "input_length": {input_length}, "output_length": {output_length}}}'


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("\x00", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        (MOONCAKE_ROW[:30], "not a JSON object"),
        (mooncake_row(timestamp="9" * 5000), "not a JSON object"),
        ('{"timestamp": 9, "input_length": 5}', "output_length must be a number of at least 1, got None"),
        ('{"input_length": 5, "output_length": 5}', "timestamp must be a number of at least 0, got None"),
        (mooncake_row(timestamp="-1"), "timestamp must be .* got -1"),
        (mooncake_row(timestamp="true"), "timestamp must be .* got True"),
        (mooncake_row(timestamp="NaN"), "timestamp must be .* got nan"),
        (mooncake_row(timestamp="Infinity"), "timestamp must be .* got inf"),
        (mooncake_row(timestamp="1e999"), "timestamp must be .* got inf"),
        (mooncake_row(timestamp="9" * 400), "timestamp must be .* got 999"),
        (mooncake_row(timestamp='"9"'), "timestamp must be .* got '9'"),
        (mooncake_row(input_length='"x"'), "input_length must be .* got 'x'"),
        (mooncake_row(input_length="0"), "input_length must be .* got 0"),
        (mooncake_row(input_length="NaN"), "input_length must be .* got nan"),
        (mooncake_row(input_length="3.5"), "input_length counts tokens and must be a whole number, got 3.5"),
        (mooncake_row(output_length="-Infinity"), "output_length must be .* got -inf"),
        (mooncake_row(output_length="[5]"), r"output_length must be .* got \[5\]"),
        (mooncake_row(output_length="1.25"), "output_length counts tokens and must be a whole number, got 1.25"),
        (mooncake_row(timestamp="4"), "this request came 3 ms before the one above it"),
    ],
)
def test_a_damaged_mooncake_row_is_named(row: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{MOONCAKE_ROW}\n{row}\n{mooncake_row()}\n")
    with pytest.raises(ValueError, match=f"trace.jsonl, line 2: {message}"):
        read_mooncake(path)


def test_azure_counts_from_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [
        AZURE_HEADER,
        AZURE_ROW,
        AZURE_ROW,
        "2023-11-16 18:15:50.9951691,396,109",
        "2023-11-17 18:15:46.6805900,1,2",
    ]
    path.write_bytes("\r\n".join(rows).encode())  # as published: CRLF, and none after the last row
    assert read_azure(path) == [
        TracedRequest(0.0, 374, 44),
        TracedRequest(0.0, 374, 44),
        TracedRequest(4314.5791, 396, 109),
        TracedRequest(86_400_000.0, 1, 2),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (f"{TIME},374", f"2 values for the columns {AZURE_HEADER}, got '{TIME},374'"),
        (TIME[:12], f"1 values for the columns {AZURE_HEADER}"),
        (f"{TIME},374,44,1", "4 values for the columns"),
        (f"{TIME},374,", "GeneratedTokens must be a whole number of at least 1, got ''"),
        (f"{TIME},x,44", "ContextTokens must be .* got 'x'"),
        (f"{TIME},-374,44", "ContextTokens must be .* got '-374'"),
        (f"{TIME},0,44", "ContextTokens must be .* got '0'"),
        (f"{TIME},3.5,44", "ContextTokens must be .* got '3.5'"),
        (f"{TIME},nan,44", "ContextTokens must be .* got 'nan'"),
        (f"{TIME},374,inf", "GeneratedTokens must be .* got 'inf'"),
        (f"{TIME},374,4_4", "GeneratedTokens must be .* got '4_4'"),
        (f"{TIME},374,٤", "GeneratedTokens must be .* got '٤'"),
        (f"{TIME},374,{'9' * 5000}", "GeneratedTokens must be .* got '999"),
        (f"{TIME},374,\udcff", "GeneratedTokens must be .* got '\ufffd'"),
        (",374,44", "TIMESTAMP must be a time such as 2023-11-16 18:15:46.6805900, got ''"),
        ("1700158546,374,44", "TIMESTAMP must be .* got '1700158546'"),
        ("2023-11-16 18:15:46,374,44", "TIMESTAMP must be .* got '2023-11-16 18:15:46'"),
        ("2023-11-16 18:15:46.680590,374,44", "TIMESTAMP must be .* got"),
        ("2023-02-30 18:15:46.6805900,374,44", "TIMESTAMP must be .* got '2023-02-30"),
        ("2023-11-16 24:15:46.6805900,374,44", "TIMESTAMP must be .* got"),
        (AZURE_HEADER, "ContextTokens must be .* got 'ContextTokens'"),
        ("2023-11-16 18:15:45.6805900,374,44", "this request came 1000 ms before the one above it"),
    ],
)
def test_a_damaged_azure_row_is_named(row: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(f"{AZURE_HEADER}\n{AZURE_ROW}\n{row}\n".encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=f"trace.csv, line 3: {message}"):
        read_azure(path)


@pytest.mark.parametrize(
    "header", [AZURE_ROW, AZURE_HEADER.lower(), AZURE_HEADER[:-1], f"{AZURE_HEADER},", "ContextTokens"]
)
def test_another_header_is_refused(header: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{header}\n{AZURE_ROW}\n")
    with pytest.raises(ValueError, match=f"line 1: the header must be {AZURE_HEADER}, got '{header}'"):
        read_azure(path)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_mooncake, "", "holds no requests"),
        (read_mooncake, "\n \n", "holds no requests"),
        (read_azure, "", "the header must be"),
        (read_azure, f"{AZURE_HEADER}\n", "holds no requests"),
    ],
)
def test_an_empty_trace_is_refused(
    read: Callable[[Path], list[TracedRequest]], text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        read(path)


def test_the_suffix_names_the_format(tmp_path: Path) -> None:
    mooncake, azure, other = tmp_path / "a.jsonl", tmp_path / "b.csv", tmp_path / "c.json"
    mooncake.write_text(MOONCAKE_ROW)
    azure.write_text(f"\ufeff{AZURE_HEADER}\n{AZURE_ROW}\n", encoding="utf-8")  # as a spreadsheet saves it
    assert read_trace(mooncake) == [TracedRequest(7.0, 5, 6)]
    assert read_trace(str(azure)) == [TracedRequest(0.0, 374, 44)]
    with pytest.raises(ValueError, match=r"c\.json ends in '\.json': a trace is \.jsonl, .* or \.csv"):
        read_trace(other)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.csv")
