"""Define how the judge names a recorded call, and an object that stands for the engine's recorded outputs."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from lab.calls import AttentionCall, Problem
from lab.recorded import flashinfer_dumps, own_form
from lab.recorded.call import RecordedCall, RecordingError

NAME_OF_OUTPUTS = "lab.recorded:OUTPUTS"  # the judge imports the recorded outputs by this name
_NUMBERED = re.compile(r"(.+)#([0-9]{1,9})")


@dataclass(frozen=True)
class RecordedCase:
    """A recorded call as a case of the judge: where it is stored, but not its tensors.

    Attributes:
        interface: the function that was called.
        path: the file of the call. If FlashInfer recorded the call, the folder of the call or of one replay of it.
        number: the number of the call in its recording, counted from 1 in the order of time.
        time: the time of the call. For a replay of a CUDA graph, it is the time of the replay if the lab recorded the call, and
            the time of the capture if FlashInfer did.
        replay: the number of the replay of a CUDA graph; 0 for an eager call.
        layer: the number of the model's layer; None if it is not known.
    """

    interface: AttentionCall
    path: str
    number: int
    time: str
    replay: int = 0
    layer: int | None = None

    @property
    def address(self) -> str:
        """Return the text by which commands name this call."""
        path = Path(self.path)
        is_dumped_replay = path.parent.name == flashinfer_dumps.REPLAYS
        return f"{path.parents[2] if is_dumped_replay else path.parent}#{self.number}"

    def read(self) -> RecordedCall:
        path = Path(self.path)
        return own_form.read(path) if path.suffix == own_form.SUFFIX else flashinfer_dumps.read(path)

    def posed(self) -> tuple[RecordedCall, Problem]:
        """Return the call with its problem. Raises what `RecordedCall.problem` does, and RecordingError for a damaged file."""
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
    """Return the attention calls of a recording, in the order of time. A call with a damaged record is listed as a decode call,
    and reading it raises RecordingError.

    Args:
        recording: a folder that `lab record` or FlashInfer wrote, or "FOLDER#3" for only the third call in it.

    Raises:
        RecordingError: there is no such folder, or it has no attention call, or no call with this number.
    """
    numbered = _NUMBERED.fullmatch(str(recording))
    folder, number = (Path(numbered[1]), int(numbered[2])) if numbered else (Path(recording), None)
    if not folder.is_dir():
        raise RecordingError(f"{folder} is no folder of recorded calls; one call is named as in calls#3")
    judged = {"", *(each.value for each in AttentionCall)}
    listed = [*flashinfer_dumps.listed(folder), *own_form.listed(folder)]
    calls = [each for each in listed if each.function in judged]
    cases = [
        RecordedCase(AttentionCall(function or AttentionCall.DECODE), str(path), place, time, replay, layer)
        for place, (path, function, time, replay, layer) in enumerate(calls, start=1)
    ]
    chosen = [case for case in cases if number in (None, case.number)]
    if not chosen:
        has = f"has no call {number}; it has {len(cases)}" if cases else "has no calls: `lab record` records calls"
        raise RecordingError(f"{folder} {has}")
    return chosen
