"""Attention calls that an engine made and somebody recorded.

A recorded call has no history of its requests' tokens: it is judged by its own page table, and a wrong table as it stands.
"""

from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.case import OUTPUTS, RecordedCase, recorded_cases

__all__ = ["OUTPUTS", "RecordedCall", "RecordedCase", "RecordingError", "recorded_cases"]
