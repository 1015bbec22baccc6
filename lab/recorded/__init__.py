"""Record the attention calls of an engine such as SGLang. They are judged from their own page tables, without histories."""

from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.case import OUTPUTS, RecordedCase, recorded_cases
from lab.recorded.recorder import Recorder, Triggers

__all__ = ["OUTPUTS", "RecordedCall", "RecordedCase", "Recorder", "RecordingError", "Triggers", "recorded_cases"]
