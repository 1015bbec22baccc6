"""List the calls of a recording as test cases for `lab judge`, or as a trace of request lengths."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from lab.calls import AttentionCall, PagedAttention, Problem
from lab.recorded import flashinfer_dumps, own_form
from lab.recorded.call import RecordedCall, RecordingError
from lab.workloads.traces import TracedRequest

NAME_OF_OUTPUTS = "lab.recorded:OUTPUTS"  # the judge imports the recorded outputs by this name
PASS_MS = 1000.0  # from one pass to the next: so long that `lab.workloads.traces.snapshot` does not mix their requests
_NUMBERED = re.compile(r"(.+)#([0-9]{1,9})")


@dataclass(frozen=True)
class RecordedCase:
    """A case of the judge that is a recorded call. It has the location of the call, but not its tensors."""

    interface: AttentionCall  #: the function that was called
    path: str  #: the file of the call; if FlashInfer recorded the call, the folder of the call or of one replay of it
    number: int  #: the number of the call in its recording, counted from 1 in the order of time
    time: str  #: the time of the call or replay; of a replay that FlashInfer recorded, the time of the capture
    replay: int = 0  #: the number of the replay of a CUDA graph; 0 for an eager call
    layer: int | None = None  #: the number of the model's layer; None if it is not known

    @property
    def address(self) -> str:
        path = Path(self.path)
        is_dumped_replay = path.parent.name == flashinfer_dumps.REPLAYS
        return f"{path.parents[2] if is_dumped_replay else path.parent}#{self.number}"

    def read(self) -> RecordedCall:
        path = Path(self.path)
        return own_form.read(path) if path.suffix == own_form.SUFFIX else flashinfer_dumps.read(path)

    def posed(self) -> tuple[RecordedCall, Problem]:
        """Read the call. Return (call, its attention problem). Raises RecordingError if the lab cannot read or judge it."""
        try:
            call = self.read()
            return call, call.problem()
        except RecordingError as error:
            raise type(error)(f"call {self.number}: {error}") from error


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("the recorded outputs cannot be called: name an implementation to call")


# Stands for the engine's kernel, whose outputs are in the recording.
OUTPUTS = SimpleNamespace(**{interface.value: _refuse for interface in AttentionCall})


def recorded_cases(recording: Path | str) -> list[RecordedCase]:
    """Return the attention calls in a folder that `lab record` or FlashInfer wrote, in the order of time; for "FOLDER#3" only
    the third call. A call whose record is damaged counts as a decode call. Raises RecordingError if there is no call.
    """
    numbered = _NUMBERED.fullmatch(str(recording))
    folder, number = (Path(numbered[1]), int(numbered[2])) if numbered else (Path(recording), None)
    if not folder.is_dir():
        raise RecordingError(f"{folder} is no folder of recorded calls; one call is named as in calls#3")
    judged = {"", *(each.value for each in AttentionCall)}
    calls = [each for each in (*flashinfer_dumps.listed(folder), *own_form.listed(folder)) if each.function in judged]
    cases = [
        RecordedCase(AttentionCall(function or AttentionCall.DECODE), str(path), place, time, replay, layer)
        for place, (path, function, time, replay, layer) in enumerate(calls, start=1)
    ]
    chosen = [case for case in cases if number in (None, case.number)]
    if not chosen:
        found = f"call {number}; it has {len(cases)}" if cases else "recorded calls; subfolders are not searched"
        raise RecordingError(f"{folder} has no {found}")
    return chosen


def traced_requests(cases: Sequence[RecordedCase], note: Callable[[str], object] = str) -> list[TracedRequest]:
    """Return the requests of the decode calls as a trace, with their numbers of keys before the call. If there are no decode
    calls, return the requests of the context calls, with their numbers of query rows. Consecutive calls with the same lengths
    count as the layers of one forward pass, and are used once. Requests without keys before the call are padding, and are left
    out. `note` is called with a sentence about each call that is left out. Raises RecordingError if no request remains.
    """
    passes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    for case in cases:
        try:
            _, problem = case.posed()
        except RecordingError as error:
            note(str(error))
            continue
        if isinstance(problem, PagedAttention) and problem.is_block_sparse:
            note(f"call {case.number} is block-sparse: its lengths count selected keys only")
            continue
        is_decode = case.interface in (AttentionCall.DECODE, AttentionCall.MLA_DECODE)
        both = zip(problem.seq_lens.tolist(), problem.q_lens(), strict=True)
        lengths = tuple(length for kv_len, q_len in both if (length := kv_len - q_len if is_decode else q_len) > 0)
        if lengths and passes[is_decode][-1:] != [lengths]:
            passes[is_decode].append(lengths)
    found = passes[True] or passes[False]
    if not found:
        raise RecordingError("no recorded call has a request with a length")
    return [TracedRequest(PASS_MS * turn, length, 1) for turn, lengths in enumerate(found) for length in lengths]
