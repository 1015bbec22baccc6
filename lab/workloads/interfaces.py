"""The functions that can be judged: FlashInfer's calls, and functions that make the metadata of calls."""

from typing import Any

from lab.calls import CALL_TYPES
from lab.calls.problem import AttentionCall
from lab.named_enum import NamedEnum


class MetadataFunction(NamedEnum):
    """A function of an engine that makes the metadata of attention calls from a batch of requests. The value is its name."""

    DRAFT_KV_INDICES = "generate_draft_decode_kv_indices"
    MHA_METADATA = "build_mha_metadata"
    MLA_METADATA = "build_mla_decode_metadata"
    MLA_PREFILL = "build_mla_prefill_metadata"
    DSV4_METADATA = "build_dsv4_metadata"


Interface = AttentionCall | MetadataFunction
INTERFACES: tuple[Interface, ...] = (*AttentionCall, *MetadataFunction)
PAGED_CALLS = tuple(call for call, each in CALL_TYPES.items() if "kv_cache" in each.__dataclass_fields__)


def interface_of(name: str) -> Interface:
    """Return the function with this name. Raise ValueError if the lab does not judge one."""
    for each in INTERFACES:
        if each.value == name:
            return each
    raise ValueError(f"{name!r} is none of {', '.join(each.value for each in INTERFACES)}")


def interfaces_of(implementation: Any) -> list[Interface]:
    """Return the functions that the lab can judge and that the implementation has."""
    return [interface for interface in INTERFACES if callable(getattr(implementation, interface.value, None))]
