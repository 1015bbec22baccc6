"""Read recorded attention calls of an engine.

A recording has no histories of its requests' tokens. A call is judged by its own page table, so that a wrong table is not
found.
"""

from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.case import OUTPUTS, RecordedCase, recorded_cases

__all__ = ["OUTPUTS", "RecordedCall", "RecordedCase", "RecordingError", "recorded_cases"]
