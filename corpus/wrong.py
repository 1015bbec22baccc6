"""Define wrong kernels: a wrong kernel is a method or a class over a right model, marked by `@wrong`.

A group is a class over a right model. Its methods are wrong variants of one stage of the model. Each marked method makes one
kernel, in which the method replaces the stage::

    class WrongKeys(Attention, changes="visible"):

        @wrong(DECODE, trigger="a window wider than 4,096 keys")
        def widest(self, seen, run, r, row, position, keys):
            \"\"\"A window holds at most 4,096 keys.\"\"\"
            return seen & (keys > position.unsqueeze(1) - 4096)

With `stage=` (of the class or of `@wrong`), the method replaces the stage, and `super()` is the right model. With `changes=`
(of the class or of `@wrong`), the method gets the right result of the stage, followed by the stage's arguments, which `where=`
may restrict. If the defect is a value of the model's attributes, a marked text replaces the method: `ignored =
wrong(instead={"sinks": None})("Sinks are ignored.")`. A kernel with several wrong stages is a marked class over the model. The
docstring describes the defect.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from lab.calls.problem import AttentionCall
from lab.workloads.interfaces import MetadataFunction

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DECODE = AttentionCall.DECODE.value
CONTEXT = AttentionCall.CONTEXT.value
MLA = AttentionCall.MLA_DECODE.value
RAGGED = AttentionCall.RAGGED_CONTEXT.value
DSV4 = AttentionCall.DSV4_DECODE.value
LISTS = MetadataFunction.DRAFT_KV_INDICES.value
MHA_METADATA = MetadataFunction.MHA_METADATA.value
MLA_METADATA = MetadataFunction.MLA_METADATA.value
MLA_PREFILL = MetadataFunction.MLA_PREFILL.value
DSV4_METADATA = MetadataFunction.DSV4_METADATA.value

Marked = TypeVar("Marked", bound=Callable[..., Any])
Problem = TypeVar("Problem", bound="DataclassInstance")  # an attention problem, or the metadata of a pass


@dataclass(frozen=True)
class WrongKernel:
    """A kernel with one defect, which at least one check must find.

    Attributes:
        name: snake_case.
        defect: the defect, in one sentence.
        trigger: the calls whose results are wrong; "" if the defect's sentence names them.
        source: the upstream thread about the defect, such as "FlashInfer #4161"; "" for a defect of the lab's.
        interface: names of the functions that the kernel has.
        make: returns a new object with these functions.
    """

    name: str
    defect: str
    trigger: str
    source: str
    interface: tuple[str, ...]
    make: Callable[[], object]

    def implementation(self) -> SimpleNamespace:
        """Return a new implementation, which has no memory of earlier calls."""
        made = self.make()
        return SimpleNamespace(**{name: getattr(made, name) for name in self.interface})


KERNELS: dict[str, WrongKernel] = {}  # by name, of the modules that are imported


@dataclass(frozen=True)
class Mark:
    """The arguments of `wrong`. A Mark is called with a class, a method or the text of a defect, which it marks."""

    interface: tuple[str, ...]
    trigger: str
    source: str
    mla: bool
    also: str
    stage: str
    changes: str
    named: str
    attributes: Mapping[str, Any]

    def __call__(self, defective: Marked) -> Marked:
        if isinstance(defective, type):
            self.register(snake_case(defective.__name__), defective, defective.__doc__)
            return defective
        if isinstance(defective, str):
            return SimpleNamespace(marks=(self,), __doc__=defective)
        defective.marks = (*getattr(defective, "marks", ()), self)  # type: ignore[attr-defined]
        return defective

    def make(self, group: type[Any], name: str, member: Any, changes: str, stage: str) -> None:
        """Make the kernel that a member of a group defines."""
        model = super(group, group)
        if hasattr(model, name):
            raise TypeError(f"{name!r} is a stage of the model of {group.__name__}")
        own: dict[str, Any] = {"__module__": group.__module__}
        if callable(member):
            if self.stage or self.changes:
                stage, changes = self.stage, self.changes
            own[stage or changes] = member if stage else changed_stage(getattr(model, changes), member)
        made: Any = type(name, (group,), own, **self.attributes)
        self.register(name, made, member.__doc__)

    def register(self, name: str, made: type[Any], defect: str | None) -> None:
        interface = self.interface or made.interface
        for each in (name, *self.also.split()):
            self._add(each, made, defect, interface)
        if self.mla:
            self._add(f"mla_{name}", made, defect, (MLA,))

    def _add(self, name: str, made: type[Any], defect: str | None, interface: tuple[str, ...]) -> None:
        if name in KERNELS:
            raise ValueError(f"two wrong kernels are called {name!r}")
        KERNELS[name] = WrongKernel(name, " ".join((defect or "").split()), self.trigger, self.source, interface, made)


def wrong(
    *interface: str,
    trigger: str = "",
    source: str = "",
    mla: bool = False,
    also: str = "",
    stage: str = "",
    changes: str = "",
    named: str = "",
    **attributes: Any,
) -> Mark:
    """Mark a method of a group, a text in a group, or a class over a right model as a wrong kernel.

    Args:
        interface: names of the functions that the kernel has; by default the model's functions.
        trigger: the calls whose results are wrong; omitted if the docstring names them.
        source: the upstream thread about the defect.
        mla: also make a kernel of the MLA decode call with this defect, whose name begins with `mla_`.
        also: names of kernels from further writers with the same defect and trigger, separated by spaces.
        stage, changes: the stage that a method replaces, or whose result it changes, if the group does not name it.
        named: the kernel's name, if it is not that of the method.
        attributes: attributes of the kernel's class, set like keywords of a class statement.
    """
    return Mark(interface, trigger, source, mla, also, stage, changes, named, attributes)


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


class Model:
    """A right implementation in stages that wrong kernels change.

    Keywords of a class statement set attributes. A keyword with the name of a stage changes the stage's result: its function
    gets the right result, followed by the stage's arguments. The keyword `where` replaces the method `where`.

    Attributes:
        interface: names of the functions that instances have.
        instead: values that replace fields of the caller's problem, or functions that return such values from the arguments of
            `changed`.
        only_with: a field of the problem: if it is not given, the defect does not apply; "" for no condition.
    """

    interface: tuple[str, ...] = ()
    instead: Mapping[str, Any] = MappingProxyType({})
    only_with: str = ""

    def __init_subclass__(cls, *, stage: str = "", changes: str = "", **attributes: Any) -> None:
        """Set the attributes and make the kernels of a group; raise TypeError for an unknown attribute."""
        super().__init_subclass__()
        if (stage or changes) and not hasattr(cls, stage or changes):
            raise TypeError(f"{cls.__name__} has no stage {stage or changes!r}")
        for name, value in attributes.items():
            setattr(cls, name, _attribute(cls, name, value))
        for name, member in [*vars(cls).items()]:
            is_stage = getattr(member, "__name__", name) != name  # it took a stage's place
            for mark in () if is_stage else getattr(member, "marks", ()):
                mark.make(cls, mark.named or name, member, changes, stage)

    def applied(self, problem: Problem, *others: Any) -> Problem:
        """Return `changed` of a problem if the defect applies to it."""
        applies = self.where(problem, *others) and not (self.only_with and getattr(problem, self.only_with) is None)
        return self.changed(problem, *others) if applies else problem

    def changed(self, problem: Problem, *others: Any) -> Problem:
        """Return the problem with the values of `instead`, whose functions also get the further arguments."""
        values = {name: value(problem, *others) if callable(value) else value for name, value in self.instead.items()}
        return replace(problem, **values)

    @staticmethod
    def where(*_: Any, **__: Any) -> bool:
        """Return True if the defect applies. The arguments are those of `changed`, or of the stage that `changes=` names."""
        return True

    def first(self, key: Any, value: Callable[[], Any]) -> Any:
        """Return the value that was computed when this object first saw the key."""
        seen: dict[Any, Any] = self.__dict__.setdefault("seen", {})
        if key not in seen:
            seen[key] = value()
        return seen[key]


def _attribute(cls: type[Any], name: str, value: Any) -> Any:
    if not hasattr(cls, name):
        raise TypeError(f"{cls.__name__} has no attribute {name!r}")
    if name == "where":
        return staticmethod(value)
    return changed_result(getattr(cls, name), value) if callable(value) else value


def changed_result(stage: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a stage, and then returns `change` of the stage's result and arguments."""

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return change(stage(self, *arguments, **named), *arguments, **named)

    return method


def changed_stage(stage: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a stage and, where `where` is true of the stage's arguments, returns `change` of the result,
    followed by these arguments.
    """

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        right = stage(self, *arguments, **named)
        return change(self, right, *arguments, **named) if self.where(*arguments, **named) else right

    return method
