"""Read recorded attention calls of an engine.

A recorded call has no history of its requests' tokens. It is judged by its own page table, so a wrong table is not detected.
"""

from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.case import OUTPUTS, RecordedCase, recorded_cases

__all__ = ["OUTPUTS", "RecordedCall", "RecordedCase", "RecordingError", "recorded_cases"]
