"""The features of a case, of a call, and of each request in it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4
from lab.checks.explain.feature import Feature, Features, Value
from lab.checks.explain.features import (
    OF_BATCH,
    OF_CALL,
    OF_EARLIER,
    OF_MODE,
    OF_REQUEST,
    OF_TENSORS,
    feature_named,
)
from lab.checks.explain.subjects import Batch, Call, CallLog, Case
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import Interface

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", E4M3: "e4m3", NVFP4: "nvfp4"}
OF_CONTENTS = ("contents", "dead", "table_tail")  # what a call's arguments do not say of an attention case


@dataclass(frozen=True)
class CallFeatures:
    """The features of one call.

    Attributes:
        features: of the call.
        of_requests: of each request in it.
        q_lens: query rows of each request.
    """

    features: Features = field(default_factory=dict, hash=False)
    of_requests: tuple[Features, ...] = field(default=(), hash=False)
    q_lens: tuple[int, ...] = ()


def features_of_case(case: Any) -> CallFeatures:
    """Return the features of a case of any check.

    Raises:
        UnknownFeatureError: a field of the case has no row in the table.
    """
    subject = Case(case)
    found = _kept([(feature_named(name).name, value) for name, value in vars(subject.fields).items()])
    found |= _read(OF_TENSORS, subject) | _read(OF_MODE, subject)
    found |= {f"{name}={value}": True for name, value in getattr(case, "non_default", {}).items()}
    return _with_lengths(found, subject.batch)


def features_of_contents(case: AttentionCase) -> Features:
    """Return those features of an attention case that its call does not have: what its tensors hold."""
    fields = Case(case).fields
    return _kept([(name, getattr(fields, name)) for name in OF_CONTENTS])


def features_of_call(interface: Interface, arguments: Mapping[str, Any], log: CallLog) -> CallFeatures:
    """Return the features of an attention call that is about to be made, and note it; lengths are read from the device.

    A call that `lab.calls` refuses has only those that earlier calls give it.
    """
    earlier = _read(OF_EARLIER, log.earlier(arguments))
    try:
        call = Call(interface, arguments)
    except (TypeError, ValueError, NotImplementedError):
        return CallFeatures(earlier)
    return _with_lengths(_read(OF_TENSORS, call) | _read(OF_CALL, call) | earlier, call.batch)


def of_any_request(shared: Features, of_requests: Iterable[Features]) -> dict[str, Value]:
    """Return the features of a call and those that any of its requests has, of numbers the largest."""
    found = dict(shared)
    for features in of_requests:
        for name, value in features.items():
            found[name] = max(int(value), int(found.get(name, 0))) if type(value) is int else value
    return found


def _with_lengths(found: dict[str, Value], batch: Batch | None) -> CallFeatures:
    if batch is None:
        return CallFeatures(found)
    of_requests = tuple(_read(OF_REQUEST, request) for request in batch.requests())
    return CallFeatures(found | _read(OF_BATCH, batch), of_requests, batch.q_lens)


def _read(features: Iterable[Feature], subject: Any) -> dict[str, Value]:
    """Return the values of the features that a subject has."""
    return _kept(
        [
            (each.name, getattr(subject, each.name, None) if each.read is None else each.read(subject))
            for each in features
        ]
    )


def _kept(values: Sequence[tuple[str, Any]]) -> dict[str, Value]:
    """Return values as features have them, without those that a subject does not have."""
    plain = [(name, _plain(value)) for name, value in values]
    return {name: value for name, value in plain if value is not None and value is not False}


def _plain(value: Any) -> Value | None:
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value).removeprefix("torch."))
    if isinstance(value, dict):
        held = set(map(_plain, value.values()))
        return held.pop() if len(held) == 1 else "mixed"
    if isinstance(value, Tensor):
        return bool(value)
    return value if isinstance(value, bool | int | str) else None
