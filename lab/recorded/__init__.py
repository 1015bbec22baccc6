"""Record attention calls of an engine, and read recorded calls.

A recorded call has no history of its requests' tokens. It is judged by its own page table, so a wrong table is not detected.
"""

from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.case import OUTPUTS, RecordedCase, recorded_cases
from lab.recorded.recorder import Recorder, Triggers

__all__ = [
    "OUTPUTS",
    "RecordedCall",
    "RecordedCase",
    "Recorder",
    "RecordingError",
    "Triggers",
    "recorded_cases",
]
