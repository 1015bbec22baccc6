"""Record the attention calls of a serving engine such as SGLang, and read recorded calls. They have no history of a request:
the judge computes the expected output from the call's own page table, so a wrong page table is not detected.
"""

from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.case import OUTPUTS, RecordedCase, recorded_cases
from lab.recorded.recorder import Recorder, Triggers

__all__ = ["OUTPUTS", "RecordedCall", "RecordedCase", "Recorder", "RecordingError", "Triggers", "recorded_cases"]
