"""Batches as a real service would have run them: request lengths from a published trace, and snapshots of it."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TracedRequest:
    """One request of a trace: when it came, how long its prompt was, how many tokens it was answered with."""

    arrival_ms: float
    input_length: int
    output_length: int


def read_mooncake(path: str | Path) -> list[TracedRequest]:
    """Read a Mooncake trace (FAST'25 release): one JSON object a line with timestamp (ms), input_length, output_length.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is damaged; names the file, the line and what is wrong.
    """
    requests = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                requests.append(_parse_mooncake(line, f"{path}, line {number}"))
    if not requests:
        raise ValueError(f"{path} holds no requests")
    return requests


def _parse_mooncake(line: str, where: str) -> TracedRequest:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON object ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object")
    numbers = []
    for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 1)):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
            raise ValueError(f"{where}: {name} must be a number of at least {least}, got {value!r}")
        numbers.append(value)
    return TracedRequest(float(numbers[0]), int(numbers[1]), int(numbers[2]))


def running_lengths(requests: Sequence[TracedRequest], at_ms: float, ms_per_token: float) -> list[int]:
    """Tokens in the cache of each request that runs at one moment: its prompt and what it has generated so far.

    Args:
        requests: the trace.
        at_ms: the moment.
        ms_per_token: how long one generated token takes; a request runs for output_length times that.
    """
    lengths = []
    for request in requests:
        generated = (at_ms - request.arrival_ms) / ms_per_token
        if 0 <= generated < request.output_length:
            lengths.append(request.input_length + int(generated))
    return lengths


def snapshot(requests: Sequence[TracedRequest], batch_size: int, ms_per_token: float = 50.0) -> list[int]:
    """Lengths of a decode batch: the first moment, in steps of a second, at which `batch_size` requests run.

    Those that came first are taken. 50 ms per token is a moderate interactive pace; it decides how many requests overlap, not
    how long they are.

    Raises:
        ValueError: there never are so many.
    """
    last_ms = max(request.arrival_ms for request in requests)
    for second in range(math.ceil(last_ms / 1000) + 1):
        lengths = running_lengths(requests, second * 1000.0, ms_per_token)
        if len(lengths) >= batch_size:
            return lengths[:batch_size]
    raise ValueError(
        f"at {ms_per_token} ms per token never {batch_size} requests of this trace run at once; take fewer or a slower pace"
    )
