"""Request lengths from a service: read a published trace, and take a snapshot of the requests that run at one moment."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

from lab.files import regular

OWN_TRACE = Path(__file__).parent / "data" / "synthetic_chat.jsonl"
MEAN_GAP_MS = 50.0  # between two arrivals of the lab's own trace
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.(\d{7})", re.ASCII)
_TICKS_PER_SECOND = 10_000_000  # a tick of Azure's times is 100 ns
_MOST = 2**53  # float64 represents all integers up to here; every valid time in ms and number of tokens is smaller


@dataclass(frozen=True)
class TracedRequest:
    arrival_ms: float
    input_length: int
    output_length: int


def own_trace() -> list[TracedRequest]:
    """Return the lab's own small trace, from a file with the result of `synthetic_chat`."""
    return read_mooncake(OWN_TRACE)


def read_trace(path: str | Path) -> list[TracedRequest]:
    """Read a trace: Mooncake's format if the file's name ends in `.jsonl`, Azure's if in `.csv`.

    Raises:
        ValueError: the suffix is neither of these, or the file is malformed; the message names the line.
    """
    readers = {".jsonl": read_mooncake, ".csv": read_azure}
    suffix = Path(path).suffix
    if suffix not in readers:
        raise ValueError(f"{path} ends in {suffix!r}: a trace is .jsonl, in Mooncake's format, or .csv, in Azure's")
    return readers[suffix](path)


def read_mooncake(path: str | Path) -> list[TracedRequest]:
    """Read a Mooncake trace (FAST'25 release, kvcache-ai/Mooncake): one JSON object per line, in order of arrival.

    Each object has timestamp (ms), input_length and output_length (tokens). Other keys, such as hash_ids, are ignored.
    """
    return _in_order([(_parse_mooncake(line, where), where) for line, where in _lines(path)], path)


def read_azure(path: str | Path) -> list[TracedRequest]:
    """Read an Azure LLM inference trace of 2023 (Azure/AzurePublicDataset): CSV, in order of arrival.

    The columns are TIMESTAMP, such as 2023-11-16 18:15:46.6805900, ContextTokens and GeneratedTokens. Arrivals are relative to
    the first row's.
    """
    lines = _lines(path)
    header, where = next(lines, ("", str(path)))
    if tuple(header.split(",")) != AZURE_COLUMNS:
        raise ValueError(f"{where}: the header must be {','.join(AZURE_COLUMNS)}, got {header!r}")
    rows = [(*_parse_azure(line, where), where) for line, where in lines]
    first_ticks = rows[0][0] if rows else 0
    requests = [
        (TracedRequest((ticks - first_ticks) * 1000 / _TICKS_PER_SECOND, context, generated), where)
        for ticks, context, generated, where in rows
    ]
    return _in_order(requests, path)


def _lines(path: str | Path) -> Iterator[tuple[str, str]]:
    with open(regular(Path(path)), encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield line.rstrip("\n"), f"{path}, line {number}"


def _in_order(requests: Sequence[tuple[TracedRequest, str]], path: str | Path) -> list[TracedRequest]:
    if not requests:
        raise ValueError(f"{path} holds no requests")
    latest_ms = -math.inf
    for request, where in requests:
        if request.arrival_ms < latest_ms:
            early_ms = latest_ms - request.arrival_ms
            raise ValueError(
                f"{where}: this request came {early_ms:g} ms before the one above it, and a trace is in order of arrival: "
                "mend the time, or sort the file"
            )
        latest_ms = request.arrival_ms
    return [request for request, _ in requests]


def _parse_mooncake(line: str, where: str) -> TracedRequest:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of nested brackets
        raise ValueError(f"{where}: not a JSON object ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object")
    arrival_ms = float(_number(row, "timestamp", 0, where))
    return TracedRequest(arrival_ms, _tokens(row, "input_length", where), _tokens(row, "output_length", where))


def _number(row: dict[str, Any], name: str, least: int, where: str) -> int | float:
    value = row.get(name)
    # The comparisons also refuse NaN and Infinity, which Python's JSON reader accepts.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= _MOST:
        raise ValueError(f"{where}: {name} must be a number of at least {least}, got {value!r}")
    return value


def _tokens(row: dict[str, Any], name: str, where: str) -> int:
    value = _number(row, name, 1, where)
    if value != int(value):
        raise ValueError(f"{where}: {name} counts tokens and must be a whole number, got {value!r}")
    return int(value)


def _parse_azure(line: str, where: str) -> tuple[int, int, int]:
    """Return (time in ticks of 100 ns since year 1, context tokens, generated tokens)."""
    values = line.split(",")
    if len(values) != len(AZURE_COLUMNS):
        raise ValueError(f"{where}: {len(values)} values for the columns {','.join(AZURE_COLUMNS)}, got {line!r}")
    for column, value in zip(AZURE_COLUMNS[1:], values[1:], strict=True):
        if re.fullmatch("[0-9]{1,15}", value) is None or int(value) < 1:
            raise ValueError(f"{where}: {column} must be a whole number of at least 1, got {value!r}")
    match = _AZURE_TIME.fullmatch(values[0])
    try:
        # Python's own parser reads six digits after the second; these times have seven.
        since_year_1 = datetime.strptime(match[1] if match else "", "%Y-%m-%d %H:%M:%S") - datetime.min
    except ValueError as error:
        sentence = "must be a time such as 2023-11-16 18:15:46.6805900"
        raise ValueError(f"{where}: {AZURE_COLUMNS[0]} {sentence}, got {values[0]!r}") from error
    assert match is not None
    ticks = (since_year_1.days * 86_400 + since_year_1.seconds) * _TICKS_PER_SECOND + int(match[2])
    return ticks, int(values[1]), int(values[2])


def running_lengths(requests: Sequence[TracedRequest], at_ms: float, ms_per_token: float) -> list[int]:
    """Return the number of cached tokens of each request that runs at `at_ms`. A request runs for output_length *
    `ms_per_token` after its arrival.
    """
    if not 0 < ms_per_token < math.inf:
        raise ValueError(
            f"ms_per_token={ms_per_token} must be finite and more than 0: the time that one generated token takes"
        )
    lengths = []
    for request in requests:
        generated = (at_ms - request.arrival_ms) / ms_per_token
        if 0 <= generated < request.output_length:
            lengths.append(request.input_length + int(generated))
    return lengths


def snapshot(requests: Sequence[TracedRequest], batch_size: int, ms_per_token: float = 50.0) -> list[int]:
    """Find the first full second at which at least `batch_size` requests run. Return the number of cached tokens of each of the
    first `batch_size` of these requests, a decode batch. 50 ms per token is a moderate interactive pace. Raise ValueError if
    there is no such second.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be 1 or more: the requests to take")
    # Only an arrival makes a batch grow, so only the full second after each arrival is examined.
    for second in sorted({math.ceil(request.arrival_ms / 1000) for request in requests}):
        lengths = running_lengths(requests, second * 1000.0, ms_per_token)
        if len(lengths) >= batch_size:
            return lengths[:batch_size]
    raise ValueError(
        f"at {ms_per_token} ms per token never {batch_size} requests of this trace run at once; take fewer or a slower pace"
    )


def synthetic_chat(num_requests: int = 1000, seed: int = 1) -> list[TracedRequest]:
    """Draw a synthetic trace, the same on every machine and fitted to no service. Arrivals are Poisson, 20 a second. Prompts
    are log-normal with median 1,000 tokens and sigma 1.2, answers with median 250 tokens and sigma 0.9. Both are clipped.
    """
    random = Random(seed)
    requests, arrival_ms = [], 0.0
    for _ in range(num_requests):
        arrival_ms += -math.log(1.0 - random.random()) * MEAN_GAP_MS
        prompt_tokens = _log_normal(random.random(), median=1000, sigma=1.2, least=16, most=120_000)
        answer_tokens = _log_normal(random.random(), median=250, sigma=0.9, least=4, most=4_000)
        requests.append(TracedRequest(float(round(arrival_ms)), prompt_tokens, answer_tokens))
    return requests


def _log_normal(uniform: float, median: float, sigma: float, least: int, most: int) -> int:
    # inv_cdf rejects 0 and 1. Draws of `Random.random` are multiples of 2**-53, so that only the draw 0 is changed.
    deviation = NormalDist().inv_cdf(max(uniform, 2.0**-53))
    return min(max(round(median * math.exp(sigma * deviation)), least), most)


def as_mooncake(requests: Sequence[TracedRequest]) -> str:
    rows = (
        {"timestamp": round(each.arrival_ms), "input_length": each.input_length, "output_length": each.output_length}
        for each in requests
    )
    return "".join(json.dumps(row) + "\n" for row in rows)
