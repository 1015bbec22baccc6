"""What problems ask for: every field is classified, and a plain call asks for nothing that a kernel could lack."""

from dataclasses import fields

from lab.calls import DecodeCall, Feature, PagedAttention, RaggedAttention, RaggedContextCall
from lab.calls.problem import FIELDS
from tests.cases import decode_arguments, random_batch
from tests.kernels.test_flashinfer_ragged_adapters import case as ragged_case


def test_every_field_is_declared_and_no_other() -> None:
    names = {field.name for problem in (PagedAttention, RaggedAttention) for field in fields(problem)}
    assert names == set(FIELDS)


def test_every_feature_can_be_asked_for() -> None:
    asked = {feature for asks in FIELDS.values() for feature in asks}
    assert asked == set(Feature) - {Feature.UNDECLARED}


def test_a_plain_call_asks_for_nothing() -> None:
    batch = random_batch([1, 1], [5, 20], head_dim=64)
    call = DecodeCall(**decode_arguments(batch, 16, out_dtype=None, return_lse=False, bmm2_scale=1.0))
    assert call.problem().features() == frozenset()


def test_a_ragged_call_asks_for_its_rows() -> None:
    posed = RaggedContextCall(**ragged_case()).problem()
    assert posed.features() <= {Feature.SEVERAL_ROWS, Feature.RAGGED_ROWS, Feature.OUT}
