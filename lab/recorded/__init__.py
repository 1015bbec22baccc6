"""Record the attention calls of an engine such as SGLang, and read them. Each call is judged from its own page table."""

from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.case import OUTPUTS, RecordedCase, recorded_cases
from lab.recorded.recorder import Recorder, Triggers

__all__ = ["OUTPUTS", "RecordedCall", "RecordedCase", "Recorder", "RecordingError", "Triggers", "recorded_cases"]
