"""The form of a wrong kernel: what `@wrong` makes of a method, a text and a class, and that all are there."""

import inspect
import itertools
import re
from typing import Any

import pytest

import corpus
from corpus.kernels import BLIND, KERNELS, MUTANTS, kernel
from corpus.models.split_kv import SplitKV
from corpus.wrong import CONTEXT, DECODE, MLA, MLA_METADATA, MLA_PREFILL, Model, wrong
from lab.workloads.interfaces import INTERFACES


class Doubling(Model, interface=(DECODE,)):
    """Returns twice what it gets."""

    factor = 2

    def trtllm_batch_decode_with_kv_cache(self, number: int) -> int:
        return self.doubled(number)

    def doubled(self, number: int) -> int:
        return number * self.factor


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The kernels that a test makes, which no other sees."""
    kernels: dict[str, Any] = {}
    monkeypatch.setattr("corpus.wrong.KERNELS", kernels)
    return kernels


def result(made: dict[str, Any], name: str) -> int:
    called: int = made[name].implementation().trtllm_batch_decode_with_kv_cache(5)
    return called


def test_a_marked_method_takes_the_place_of_its_stage(made: dict[str, Any]) -> None:
    class Group(Doubling, stage="doubled"):
        @wrong(trigger="every call")
        def one_more(self, number: int) -> int:
            """One is added."""
            return super().doubled(number) + 1

        @wrong(factor=3, also="same")
        def larger(self, number: int) -> int:
            """The factor is 3."""
            return super().doubled(number)

        @wrong(stage="trtllm_batch_decode_with_kv_cache")
        def whole(self, number: int) -> int:
            """One is added at the end."""
            return self.doubled(number) + 1

        @wrong(changes="doubled")
        def two_more(self, right: int, number: int) -> int:
            """Two are added to what the stage gives."""
            return right + 2 * (number == 5)

        less = wrong(stage="doubled", doubled=lambda right, number: right - number, source="FlashInfer #4161")(
            "It is 5."
        )

    assert [result(made, name) for name in made] == [11, 15, 15, 11, 12, 5]
    assert (made["less"].defect, made["less"].source) == ("It is 5.", "FlashInfer #4161")
    assert made["one_more"].defect == "One is added."
    assert made["one_more"].trigger == "every call"
    assert [*made] == ["one_more", "larger", "same", "whole", "two_more", "less"]
    assert Group().doubled(5) == 10


def test_a_marked_class_is_a_kernel(made: dict[str, Any]) -> None:
    @wrong(DECODE, trigger="every call")
    class TimesSeven(Doubling, factor=7):
        """The factor
        is 7.
        """

    assert result(made, "times_seven") == 35
    assert made["times_seven"].defect == "The factor is 7."
    with pytest.raises(ValueError, match="two wrong kernels are called 'times_seven'"):
        wrong()(TimesSeven)


def test_what_a_model_does_not_have_is_refused(made: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="Misspelt has no attribute 'sauce'"):
        type("Misspelt", (SplitKV,), {}, sauce="FlashInfer #4161")
    with pytest.raises(TypeError, match="no attribute 'faktor'"):
        type("Group", (Doubling,), {"larger": wrong(faktor=3)("The factor is 3.")})
    with pytest.raises(TypeError, match="Group has no stage 'halved'"):
        type("Group", (Doubling,), {}, stage="halved")
    with pytest.raises(TypeError, match="'factor' is a stage of the model of Group"):
        type("Group", (Doubling,), {"factor": wrong()("The factor is another.")})
    assert made == {}


def test_every_kernel_is_there_with_a_defect_and_its_functions() -> None:
    assert {name: name for name in KERNELS} == {each.name: each.name for each in KERNELS.values()}
    assert {name: int(name[5:]) for name in BLIND} == {f"blind{number}": number for number in range(1, 591)}
    assert {*BLIND, *MUTANTS} == set(KERNELS)
    for each in KERNELS.values():
        assert each.defect.endswith(".")
        assert set(each.interface) <= {interface.value for interface in INTERFACES}
        assert [*vars(each.implementation())] == [*each.interface]
    assert all(each.trigger for each in BLIND.values())
    for name, each in MUTANTS.items():
        assert re.fullmatch(r"[a-z0-9_]+", name)
        assert name.startswith("mla_") == (each.interface in ((MLA,), (MLA_METADATA,), (MLA_PREFILL,)))


def test_kernels_are_found_by_name() -> None:
    assert kernel("zeros").interface == (DECODE, CONTEXT)
    with pytest.raises(ValueError, match="no wrong kernel is called 'none'"):
        kernel("none")
    assert corpus.zeros is corpus.zeros
    with pytest.raises(AttributeError, match="no wrong kernel is called 'none'"):
        _ = corpus.none


def test_kernels_are_called_as_flashinfer_is() -> None:
    for name, function in itertools.product(("zeros", "blind3"), (DECODE,)):
        parameters = inspect.signature(getattr(kernel(name).implementation(), function)).parameters
        assert list(parameters)[:2] == ["query", "kv_cache"]
