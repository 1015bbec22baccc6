"""The functions that can be judged: FlashInfer's calls, and functions that make the metadata of calls."""

from typing import Any

from lab.calls import CALL_TYPES
from lab.names import INTERFACES, Interface
from lab.names import MetadataFunction as MetadataFunction

PAGED_CALLS = tuple(call for call, each in CALL_TYPES.items() if "kv_cache" in each.__dataclass_fields__)


def interface_of(name: str) -> Interface:
    """Return the `Interface` of a judged function, by its name. Raise ValueError if the lab judges no function of this name."""
    for each in INTERFACES:
        if each.value == name:
            return each
    raise ValueError(f"{name!r} is none of {', '.join(each.value for each in INTERFACES)}")


def interfaces_of(implementation: Any) -> list[Interface]:
    """Return the judged functions that an implementation has, such as a module. Raise ValueError if one is not callable."""
    found = {each: getattr(implementation, each.value, None) for each in INTERFACES}
    for each, function in found.items():
        if function is not None and not callable(function):
            raise ValueError(f"its {each.value} is of type {type(function).__name__}, and no function")
    return [each for each, function in found.items() if function is not None]
