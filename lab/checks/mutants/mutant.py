"""A deliberate defect as data."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from lab.workloads.interfaces import Interface

DECODE = Interface.DECODE.value
CONTEXT = Interface.CONTEXT.value
MLA_DECODE = Interface.MLA_DECODE.value
RAGGED_CONTEXT = Interface.RAGGED_CONTEXT.value
DRAFT_INDICES = Interface.DRAFT_KV_INDICES.value
MHA_METADATA = Interface.MHA_METADATA.value
MLA_METADATA = Interface.MLA_METADATA.value


class Defective:
    """An implementation that is right but for the defect in its class's docstring.

    Attributes:
        source: the upstream thread that had the defect; "" for one of ours.
        interface: names of the functions that its instances have.
        is_model: set in the body of a class that is right, and that mutants are made of.
    """

    source: str = ""
    interface: tuple[str, ...] = ()
    is_model: bool = False


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
        """The mutant that a class describes: its name in snake_case, its docstring the defect."""
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", defective.__name__).lower()
        defect = " ".join((defective.__doc__ or "").split())
        return cls(name, defect, defective.source, defective.interface, defective)

    def implementation(self) -> SimpleNamespace:
        """A fresh implementation, with what it may remember of earlier calls still empty."""
        made = self.make()
        return SimpleNamespace(**{name: getattr(made, name) for name in self.interface})


def mutants_of(module: str) -> tuple[Mutant, ...]:
    """Return a mutant for each defective class that a module has defined so far, in order, but for its models."""
    defined = [each for each in vars(sys.modules[module]).values() if isinstance(each, type)]
    own = [each for each in defined if issubclass(each, Defective) and each.__module__ == module]
    return tuple(Mutant.of(each) for each in own if "is_model" not in vars(each))
