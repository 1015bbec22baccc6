"""One recorded call as a case of the judge, and the recorded outputs as an implementation to be judged."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lab.calls.problem import AttentionCall
from lab.recorded import own_form
from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.flashinfer_dumps import DumpedCall, dumped_calls, is_call

NAME_OF_OUTPUTS = "lab.recorded:OUTPUTS"  # the judge imports the recorded outputs by this name
MOST_SEARCHED = 500  # folders in which calls are searched for an error's sentence
_NUMBERED = re.compile(r"(.+)#(\d+)")


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
        is_dumped_replay = self.replay and path.suffix != ".pt"
        return f"{path.parents[2] if is_dumped_replay else path.parent}#{self.number}"

    def read(self) -> RecordedCall:
        """Read the call.

        Raises:
            RecordingError: the call cannot be read.
        """
        path = Path(self.path)
        if path.suffix == ".pt":
            return own_form.read(path)
        return DumpedCall(path, self.interface.value, self.time, replay=self.replay).read()


class _RecordedOutputs:
    """Stands for the engine's implementation: its results are in the recording, and a call of its functions raises
    RuntimeError.
    """

    def __init__(self) -> None:
        for interface in AttentionCall:
            setattr(self, interface.value, self._refuse)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("the recorded outputs cannot be called: name an implementation to call")


OUTPUTS = _RecordedOutputs()


def recorded_cases(recording: Path | str) -> list[RecordedCase]:
    """Return the attention calls of a recording, in the order of time.

    Args:
        recording: a folder that `lab record` or FlashInfer wrote, "FOLDER#3" for only its third call, or one file that
            `lab record` wrote; the call's number is that in its folder.

    Raises:
        RecordingError: there is no such folder or file, or it has no attention call, or no call with this number.
    """
    found = _NUMBERED.fullmatch(str(recording))
    path = Path(found[1] if found else recording)
    if not found and "#" in path.name and not path.exists():
        raise RecordingError(f"{recording}: '{path.name.rpartition('#')[2]}' is no call number, such as 3 in calls#3")
    if not path.exists():
        raise RecordingError(f"{path} is no folder of recorded calls")
    folder = path.parent if path.is_file() else path
    cases = [  # a call with a damaged record counts as a decode call, and is declined
        RecordedCase(
            AttentionCall(call.function or AttentionCall.DECODE),
            str(call.path),
            number,
            call.time,
            call.replay,
            call.layer,
        )
        for number, call in enumerate(_calls(folder), start=1)
    ]
    cases = cases if path is folder else [case for case in cases if case.path == str(path)]
    chosen = [case for case in cases if not found or case.number == int(found[2])]
    if not chosen:
        has = f"no call {found[2]}; it has {len(cases)}" if found and cases else f"no calls{_elsewhere(path)}"
        raise RecordingError(f"{path} has {has}")
    return chosen


def _calls(folder: Path) -> list[DumpedCall | own_form.OwnCall]:
    """Return the attention calls of a folder, in both forms."""
    judged = {each.value for each in AttentionCall}
    there: list[DumpedCall | own_form.OwnCall] = [*dumped_calls(folder), *own_form.own_calls(folder)]
    return [call for call in there if call.function in judged or not call.function]


def _elsewhere(folder: Path) -> str:
    """Return the end of a sentence about a folder without calls: where calls are, near by."""
    if is_call(folder):
        return f": it is one call, and the recording is {folder.absolute().parent}"
    near = itertools.islice(itertools.chain(folder.glob("*/"), folder.glob("*/*/")), MOST_SEARCHED)
    counts = {each: len(_calls(each)) for each in near if not is_call(each.parent)}
    there = [f"{count} in {each}" for each, count in sorted(counts.items()) if count]
    return f", but {' and '.join(there[:3])}" if there else ": `lab record` records calls"
