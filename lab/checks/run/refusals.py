"""Name the exceptions by which a kernel refuses a call. Only a process that loads the kernel imports these exceptions."""

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.loading import LoadError, is_same_module, load, name_of


@dataclass(frozen=True)
class Refusals:
    """The names of the exceptions by which a kernel refuses a call. Call `resolve`, which imports the exceptions, only in a
    process that loads the kernel, because an exception may be defined in the kernel's module.
    """

    names: tuple[str, ...]  #: of the form "module:attribute" or "file.py:attribute"
    given: tuple[str, ...]  #: the names as the user wrote them
    classes: tuple[type[BaseException], ...] = ()  #: the exceptions if they are imported

    @classmethod
    def of(cls, names: str, kernel: str = "") -> "Refusals":
        """Return the exceptions that a comma-separated list names, such as "ValueError,my/kernel.py:Unsupported".

        Args:
            names: the list. A name is a built-in exception ("ValueError"), an attribute of a module ("my.errors.Refused") or
                of a file ("my/errors.py:Refused"), or an attribute of the kernel's module ("Unsupported").
            kernel: name of the kernel, or "". Its module is loaded once, even if the list names it in another form.
        """
        own, found = kernel.partition(":")[0], dict[str, str]()
        for name in filter(None, map(str.strip, names.split(","))):
            where, _, attribute = name.rpartition(":" if ":" in name else ".")
            if not where:
                where = "builtins" if hasattr(builtins, attribute) or not own else own
            elif is_same_module(where, own):
                where = own
            found[f"{where}:{attribute}"] = name
        return cls(tuple(found), tuple(found.values()))

    @classmethod
    def of_classes(cls, classes: Sequence[type[BaseException]]) -> "Refusals":
        names = tuple(map(name_of, classes))
        return cls(names, names, tuple(classes))

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the classes: one may be in a file outside any package. A worker imports it again.
        return Refusals, (self.names, self.given)

    def resolve(self) -> tuple[type[BaseException], ...]:
        """Import the exceptions and return their classes. Raises ValueError if a name is no exception."""
        return self.classes or tuple(map(_exception, self.names, self.given))


def _exception(name: str, given: str) -> type[BaseException]:
    why, found = "", None
    try:
        found = load(name)
    except LoadError as error:
        why = f" ({error})"
    if isinstance(found, type) and issubclass(found, BaseException):
        return found
    raise ValueError(
        f"{given!r} is no exception: name one of Python's, such as NotImplementedError, one of the kernel's module, such as "
        f"Unsupported, or one with its module or file, such as my.errors.Refused or my/errors.py:Refused{why}"
    )
