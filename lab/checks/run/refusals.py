"""The exceptions that count as refusals of a call: classes, or names that only a process with the kernel imports."""

import builtins
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lab.loading import LoadError, is_same_module, load, name_of


class Refusals(tuple[type[BaseException], ...]):
    """The exception classes that count as refusals of a call. A worker imports them again by their names."""

    names: tuple[str, ...]

    def __new__(cls, classes: Iterable[type[BaseException]], names: Iterable[str] = ()) -> "Refusals":
        made = super().__new__(cls, classes)
        made.names = tuple(names) or tuple(map(name_of, made))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve_refusals, (",".join(self.names),)

    def resolve(self) -> "Refusals":
        return self


@dataclass(frozen=True)
class RefusalNames:
    """The names of exceptions that count as refusals of a call. `resolve` imports their modules. One of them may be the
    kernel's, so that only processes that load the kernel may call it.
    """

    names: tuple[str, ...]  #: of the form "module:attribute" or "file.py:attribute"
    given: tuple[str, ...]  #: the names as the user wrote them

    @classmethod
    def of(cls, names: str, kernel: str = "") -> "RefusalNames":
        """Return the names in a comma-separated list of exceptions, such as "ValueError,my/kernel.py:Unsupported".

        Args:
            names: each name is a built-in exception ("ValueError"), an attribute of a module ("my.errors.Refused") or
                file ("my/errors.py:Refused"), or an attribute of the kernel's module ("Unsupported").
            kernel: name of the kernel, or "". Its module is imported by this name only, so that it is loaded once.
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

    def resolve(self) -> Refusals:
        """Import and return the exception classes. Raise ValueError if a name is no exception."""
        found = dict[str, type[BaseException]]()
        for name, given in zip(self.names, self.given, strict=True):
            why, each = "", None
            try:
                each = load(name)
            except LoadError as error:
                why = f" ({error})"
            if not (isinstance(each, type) and issubclass(each, BaseException)):
                raise ValueError(
                    f"{given!r} is no exception: name one of Python's, such as NotImplementedError, one of the kernel's "
                    f"module, such as Unsupported, or one with its module or file, such as my.errors.Refused or "
                    f"my/errors.py:Refused{why}"
                )
            found[name] = each
        return Refusals(found.values(), found)


def resolve_refusals(names: str, kernel: str = "") -> Refusals:
    return RefusalNames.of(names, kernel).resolve()
