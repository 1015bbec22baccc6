"""One recorded call as a case of the judge, and the recorded outputs as an implementation to be judged."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from lab.calls import AttentionCall, Problem
from lab.recorded import flashinfer_dumps, own_form
from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.flashinfer_dumps import recording_of

NAME_OF_OUTPUTS = "lab.recorded:OUTPUTS"  # the judge imports the recorded outputs by this name
MOST_SEARCHED = 500  # folders below a folder without calls, in which calls are searched
_NUMBERED = re.compile(r"(.+)#([0-9]{1,9})")


@dataclass(frozen=True)
class RecordedCase:
    """A recorded call. Its `repr` is an expression that makes an equal object.

    Attributes:
        interface: the function that was called.
        path: the file of the call; for a call that FlashInfer recorded, the folder of the call or of one of its replays.
        number: the number of the call in its recording, counted from 1 in the order of time.
        time: the time of the call; for a replay the time of the replay, or of the capture if FlashInfer recorded it.
        replay: the number of the replay of a CUDA graph; 0 for an eager call.
        layer: the layer of the model; None if it is not known.
    """

    interface: AttentionCall
    path: str
    number: int
    time: str
    replay: int = 0
    layer: int | None = None

    @property
    def address(self) -> str:
        """Return "FOLDER#number": for this text `recorded_cases` returns only this call."""
        path = Path(self.path)
        is_dumped_replay = self.replay and path.suffix != own_form.SUFFIX
        return f"{path.parents[2] if is_dumped_replay else path.parent}#{self.number}"

    def read(self) -> RecordedCall:
        """Read the call.

        Raises:
            RecordingError: the call cannot be read.
        """
        path = Path(self.path)
        return own_form.read(path) if path.suffix == own_form.SUFFIX else flashinfer_dumps.read(path)

    def posed(self) -> tuple[RecordedCall, Problem]:
        """Read the call, and return it with the attention that its arguments define.

        Raises:
            RecordingError: the call cannot be read, or is refused by `RecordedCall.problem`, with an error of the same type.
        """
        try:
            call = self.read()
            return call, call.problem()
        except RecordingError as error:
            raise type(error)(f"call {self.number}: {error}") from error


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("the recorded outputs cannot be called: name an implementation to call")


# Stands for the engine's implementation, whose results are in the recording.
OUTPUTS = SimpleNamespace(**{interface.value: _refuse for interface in AttentionCall})


def recorded_cases(recording: Path | str) -> list[RecordedCase]:
    """Return the attention calls of a recording, in the order of time.

    Args:
        recording: a folder that `lab record` or FlashInfer wrote, "FOLDER#3" for only its third call, or one file that
            `lab record` wrote; the call's number is that in its folder. A folder without calls stands for the only folder with
            calls in it.

    Raises:
        RecordingError: there is no such folder or file, or it has no attention call, or no call with this number.
    """
    numbered = _NUMBERED.fullmatch(str(recording))
    path, number = (Path(numbered[1]), int(numbered[2])) if numbered else (Path(recording), None)
    if number is None and "#" in path.name and not path.exists():
        raise RecordingError(f"{recording}: '{path.name.rpartition('#')[2]}' is no call number, such as 3 in calls#3")
    if not path.exists():
        raise RecordingError(f"{path} is no folder of recorded calls")
    folder = path.parent if path.is_file() else path
    cases = _cases(folder)
    below = {} if cases or path is not folder else _below(folder)
    if not cases and len(below) == 1:
        (cases,) = below.values()
    cases = cases if path is folder else [case for case in cases if case.path == str(path)]
    chosen = [case for case in cases if number in (None, case.number)]
    if chosen:
        return chosen
    if cases:
        raise RecordingError(f"{path} has no call {number}; it has {len(cases)}")
    around = recording_of(folder)
    near = " and ".join(f"{len(found)} in {each}" for each, found in itertools.islice(below.items(), 3))
    where = f": it is a part of the recording {around}" if around else f", but {near}" if near else ""
    raise RecordingError(f"{path} has no calls{where or ': `lab record` records calls'}")


def _below(folder: Path) -> dict[Path, list[RecordedCase]]:
    """Return the calls of each folder with calls that is at most two levels below a folder."""
    children = [each for each in folder.glob("*/") if not each.is_symlink()]
    deeper = (deep for each in children for deep in each.glob("*/") if not deep.is_symlink())
    near = sorted(itertools.islice(itertools.chain(children, deeper), MOST_SEARCHED))
    return {each: cases for each in near if (cases := _cases(each))}


def _cases(folder: Path) -> list[RecordedCase]:
    """Return the attention calls of a folder, in both forms; none if the folder is a part of a recording. A call with a damaged
    record counts as a decode call, and is declined.
    """
    if recording_of(folder) is not None:
        return []
    judged = {each.value for each in AttentionCall}
    there = [*flashinfer_dumps.dumped_calls(folder), *own_form.own_calls(folder)]
    calls = [call for call in there if call.function in judged or not call.function]
    return [
        RecordedCase(AttentionCall(function or AttentionCall.DECODE), str(path), number, time, replay, layer)
        for number, (time, _, replay, path, function, layer) in enumerate(calls, start=1)
    ]
