"""What a serving engine sends: the values of each parameter that it passes to the judged functions, and where its code says so.

`profiles.json`, beside this module, has the values, as they were read in the engines' code. It also has the parameter that a
feature of a call or case shows (`shown_by`), with the parameter's value, or "" if this is the feature's own. A case that no
engine sends is a documented corner: the documentation allows it, and a kernel that is wrong there spoils no request.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.calls.problem import AttentionCall
from lab.checks.explain.call_features import features_of_case
from lab.checks.explain.feature import Features
from lab.checks.parameters.models import Configuration
from lab.checks.run.verdicts import CaseVerdict
from lab.files import read_json
from lab.recorded.case import RecordedCase
from lab.workloads.interfaces import Interface

ANY = "any"
ALL_BUT = f"{ANY} but "
EVERY = "every"  # the rows of all functions that the engine calls
OF_LENGTHS = ("no_keys", "fewer_keys", "no_rows")  # which say something of a call alone: a prefix may have no token


@dataclass(frozen=True)
class Parameter:
    """The values that an engine passes for one parameter."""

    values: str  # texts separated by " | ", alone or after "any but "; "any" for every value, "" for none
    source: str  # file and lines in the engine's folder
    remark: str  # the forward modes that pass the values, or another remark

    def has(self, value: Any) -> bool:
        """Return True if the engine passes the value."""
        is_listed = str(value).lower() in self.values.removeprefix(ALL_BUT).split(" | ")
        return is_listed != self.values.startswith(ALL_BUT) or self.values == ANY


@dataclass(frozen=True)
class Profile:
    """What one release of a serving engine sends."""

    name: str
    version: str
    folder: str  # of the sources in the engine's package
    # Parameters by their names; by the short names of the functions to which they belong, or by `EVERY`.
    functions: Mapping[str, Mapping[str, Parameter]]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def of(self, interface: Interface) -> Mapping[str, Parameter]:
        """Return the parameters of a function; {} if the engine does not call it."""
        own = [rows for names, rows in self.functions.items() if interface.name.lower() in names.split()]
        every = self.functions[EVERY] if own else {}
        return {name: parameter for rows in (every, *own) for name, parameter in rows.items()}

    def passes(self, interface: Interface, values: Iterable[tuple[str, Any]]) -> bool:
        """Return True if the engine calls the function, and passes these values, each given as (parameter, value)."""
        parameters = self.of(interface)
        return bool(parameters) and all(parameters[name].has(value) for name, value in values if name in parameters)

    def sends(self, interface: Interface, case: Any) -> bool:
        """Return True if the engine makes the call or the pass that a case describes."""
        if isinstance(case, Configuration):
            return self.passes(interface, case.values.items())
        found = features_of_case(case)
        requests = found.of_requests or ({},)
        return all(self.passes(interface, _values(interface, {**found.features, **request})) for request in requests)

    def concerns(self, verdict: CaseVerdict) -> bool:
        """Return True if the engine sends what a verdict is about.

        A check varies the call of a case. If results are wrong, the engine must make the call of at least one of them.
        """
        if isinstance(verdict.case, RecordedCase) or not self.sends(verdict.interface, verdict.case):
            return False
        wrong = [result for result in verdict.judged.results if result.wrong]
        is_one_call = isinstance(verdict.case, Configuration) and verdict.check == "K18"
        if not wrong or hasattr(verdict.case, "mode") or is_one_call:  # a pass is made as SGLang makes it
            return True
        return any(
            self.passes(verdict.interface, _values(verdict.interface, {**result.features, **request}))
            for result in wrong
            for request in [features for features, is_wrong in result.requests if is_wrong] or [{}]
        )


def _values(interface: Interface, features: Features) -> Iterator[tuple[str, Any]]:
    """Yield (parameter, value) for the values that a call, or a case that is no `Configuration`, shows by its features."""
    is_call = isinstance(interface, AttentionCall)
    if is_call and "dtype" in features:
        query = features.get("query_dtype", features["dtype"])
        yield "dtypes", f"{query}/{features.get('kv_dtype', query)}"
    for name, value in features.items():
        if name not in OF_LENGTHS or (is_call and not (name == "fewer_keys" and features.get("no_keys"))):
            parameter, shown = _table()["shown_by"].get(name, (name, ""))
            yield parameter, shown or value


@functools.cache
def _table() -> Any:
    return read_json(Path(__file__).with_suffix(".json"))


@functools.cache
def profiles() -> Mapping[str, Profile]:
    """Return the profiles by the names that commands take, such as "sglang"."""
    found = {}
    for key, engine in _table()["engines"].items():
        of_functions = engine.pop("functions").items()
        rows = {names: {name: Parameter(*row) for name, row in rows.items()} for names, rows in of_functions}
        found[key] = Profile(**engine, functions=rows)
    return found


def profile_named(key: str) -> Profile:
    """Return the profile with a name that commands take.

    Raises:
        ValueError: there is no such profile.
    """
    if key not in profiles():
        raise ValueError(f"no profile is called {key!r}: one of {', '.join(profiles())}")
    return profiles()[key]
