"""A deliberate defect as data."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from lab.workloads.interfaces import Interface

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DECODE = Interface.DECODE.value
CONTEXT = Interface.CONTEXT.value
MLA_DECODE = Interface.MLA_DECODE.value
RAGGED_CONTEXT = Interface.RAGGED_CONTEXT.value
DRAFT_INDICES = Interface.DRAFT_KV_INDICES.value
MHA_METADATA = Interface.MHA_METADATA.value
MLA_METADATA = Interface.MLA_METADATA.value
MLA_PREFILL = Interface.MLA_PREFILL.value

Problem = TypeVar("Problem", bound="DataclassInstance")  # an attention problem, or the metadata of a pass


class Defective:
    """An implementation that is right but for the defect in its class's docstring.

    Keywords of a class statement set these attributes: `class Zeros(SplitKV, mla=True):`. A keyword with the name of a method,
    a stage, changes its result: the function that it gives gets the right one, and then the stage's own arguments. `where`
    takes the place of the method instead.

    Attributes:
        source: the upstream thread that had the defect; "" for one of ours.
        interface: names of the functions that its instances have.
        mla: the MLA decode call with this defect is a mutant too.
        is_model: the class is right, and mutants are made of it; not inherited.
        instead: values of fields of the problem that take the place of the caller's, or functions of the problem that
            return them.
        only_with: the field of the problem without which `instead` changes nothing; "" for no condition.
    """

    source: str = ""
    interface: tuple[str, ...] = ()
    mla: bool = False
    is_model: bool = False
    instead: Mapping[str, Any] = MappingProxyType({})
    only_with: str = ""

    def __init_subclass__(cls, *, is_model: bool = False, **attributes: Any) -> None:
        """Set the attributes and change the stages; raises TypeError for one that the class does not have."""
        super().__init_subclass__()
        cls.is_model = is_model
        for name, value in attributes.items():
            if not hasattr(cls, name):
                raise TypeError(f"{cls.__name__} has no attribute {name!r}")
            if name == "where":
                value = staticmethod(value)
            elif callable(value):
                value = changed_stage(getattr(cls, name), value)
            setattr(cls, name, value)

    def misread(self, problem: Problem, *others: Any) -> Problem:
        """Return a problem with the values of `instead`, whose functions get the others too, where the defect shows."""
        if not self.where(problem, *others) or (self.only_with and getattr(problem, self.only_with) is None):
            return problem
        values = {name: value(problem, *others) if callable(value) else value for name, value in self.instead.items()}
        return replace(problem, **values)

    @staticmethod
    def where(*_: Any) -> bool:
        """Tell whether the defect shows, of the problem and the others of `misread`."""
        return True


class Memory:
    """A part of a defective implementation that remembers earlier calls; each instance for itself."""

    def first(self, key: Any, value: Callable[[], Any]) -> Any:
        """Return the value that was computed when the key was first seen."""
        memory: dict[Any, Any] = self.__dict__.setdefault("memory", {})
        if key not in memory:
            memory[key] = value()
        return memory[key]


class ReadOnce(Memory):
    """A part that copies tensors of a problem when their addresses are first seen: the copies serve later calls.

    Attributes:
        fields: of the problem, whose tensors are copied.
    """

    fields: tuple[str, ...] = ()

    def changed(self, problem: Problem) -> Problem:
        """Return the problem with the copies."""
        return replace(problem, **{name: self._kept(problem, getattr(problem, name)) for name in self.fields})

    def _kept(self, problem: Problem, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self.first((value.data_ptr(), value.shape, self.also_by(problem)), value.clone)

    def also_by(self, problem: Any) -> Any:
        """Return what else must be as it was for a copy to serve."""


def changed_stage(stage: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method whose result is `change` of a stage's, followed by the stage's own arguments."""

    def method(self: Defective, *arguments: Any, **named: Any) -> Any:
        return change(stage(self, *arguments, **named), *arguments, **named)

    return method


@dataclass(frozen=True)
class Mutant:
    """An implementation that is right but for one defect, which some check must find.

    Attributes:
        name: snake_case.
        defect: one sentence: what is wrong.
        source: the upstream thread that had it, "FlashInfer #4161"; "" for one of ours.
        interface: names of the functions that it has.
        make: a fresh object that has them.
    """

    name: str
    defect: str
    source: str
    interface: tuple[str, ...]
    make: Callable[[], object]

    @classmethod
    def of(cls, defective: type[Defective]) -> "Mutant":
        """Return the mutant that a class describes: its name in snake_case, its docstring the defect."""
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", defective.__name__).lower()
        defect = " ".join((defective.__doc__ or "").split())
        return cls(name, defect, defective.source, defective.interface, defective)

    @classmethod
    def of_mla(cls, defective: type[Defective]) -> "Mutant":
        """Return the mutant whose MLA decode call has a class's defect: "mla_" before its name."""
        mutant = cls.of(defective)
        return replace(mutant, name=f"mla_{mutant.name}", interface=(MLA_DECODE,))

    def implementation(self) -> SimpleNamespace:
        """Make a fresh implementation, with what it may remember of earlier calls still empty."""
        made = self.make()
        return SimpleNamespace(**{name: getattr(made, name) for name in self.interface})


def defects_of(*modules: ModuleType) -> list[type[Defective]]:
    """Return the defective classes that modules define, in order, but for their models."""
    defined = [(module, each) for module in modules for each in vars(module).values() if isinstance(each, type)]
    classes = [each for module, each in defined if issubclass(each, Defective) and each.__module__ == module.__name__]
    return [each for each in classes if not each.is_model]
