"""Read the profiles of serving engines: which values an engine passes for each parameter of the judged functions.

`profiles.json` has the values, and the lines of the engine's code that show them.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lab.calls.problem import AttentionCall
from lab.checks.explain.call_features import features_of_case
from lab.checks.explain.feature import Features
from lab.checks.parameters.models import Configuration
from lab.checks.run.verdicts import CaseVerdict
from lab.files import read_json
from lab.names import PROFILES
from lab.recorded.case import RecordedCase
from lab.workloads.interfaces import Interface

ANY = "any"
ALL_BUT = f"{ANY} but "
EVERY = "every"  # key of the parameters that all functions of the engine share
OF_LENGTHS = ("no_keys", "fewer_keys", "no_rows")  # features that count only for attention calls, not for passes


@dataclass(frozen=True)
class Parameter:
    values: str  # texts separated by " | ", or "any but " and such texts; "any" for every value, "" for none
    source: str  # file and lines in the engine's folder
    remark: str  # the forward modes that pass the values, or another remark

    def has(self, value: Any) -> bool:
        is_listed = str(value).lower() in self.values.removeprefix(ALL_BUT).split(" | ")
        return is_listed != self.values.startswith(ALL_BUT) or self.values == ANY


@dataclass(frozen=True)
class Profile:
    """One release of a serving engine: which judged functions it calls, and which values it passes to them."""

    name: str
    version: str
    folder: str  # folder of the sources in the engine's package
    # From the short names of functions (or `EVERY`) to the parameters of these functions by name.
    functions: Mapping[str, Mapping[str, Parameter]]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def of(self, interface: Interface) -> Mapping[str, Parameter]:
        """Return the values that the engine passes to a function, by parameter; {} if the engine does not call the function."""
        own = [rows for names, rows in self.functions.items() if interface.name.lower() in names.split()]
        every = self.functions[EVERY] if own else {}
        return {name: parameter for rows in (every, *own) for name, parameter in rows.items()}

    def passes(self, interface: Interface, values: Iterable[tuple[str, Any]]) -> bool:
        """Return True if the engine calls the function and may pass all of these (parameter, value) pairs."""
        parameters = self.of(interface)
        return bool(parameters) and all(parameters[name].has(value) for name, value in values if name in parameters)

    def sends(self, interface: Interface, case: Any) -> bool:
        """Return True if the engine may make the call, or the calls of the forward pass, that a case describes."""
        if isinstance(case, Configuration):
            return self.passes(interface, case.values.items())
        found = features_of_case(case)
        requests = found.of_requests or ({},)
        return all(self.passes(interface, _values(interface, {**found.features, **request})) for request in requests)

    def concerns(self, verdict: CaseVerdict) -> bool:
        """Return True if the engine may make the case's call and, if results are wrong, a call whose result is wrong."""
        if isinstance(verdict.case, RecordedCase) or not self.sends(verdict.interface, verdict.case):
            return False
        # A check also makes variations of the case's call, which the engine may never make.
        wrong = [result for result in verdict.judged.results if result.wrong]
        is_one_call = isinstance(verdict.case, Configuration) and verdict.check == "K18"
        if not wrong or hasattr(verdict.case, "mode") or is_one_call:  # all calls of a forward pass are an engine's
            return True
        return any(
            self.passes(verdict.interface, _values(verdict.interface, {**result.features, **request}))
            for result in wrong
            for request in [features for features, is_wrong in result.requests if is_wrong] or [{}]
        )


def _values(interface: Interface, features: Features) -> Iterator[tuple[str, Any]]:
    is_call = isinstance(interface, AttentionCall)
    if is_call and "dtype" in features:
        query = features.get("query_dtype", features["dtype"])
        yield "dtypes", f"{query}/{features.get('kv_dtype', query)}"
    for name, value in features.items():
        if name not in OF_LENGTHS or (is_call and not (name == "fewer_keys" and features.get("no_keys"))):
            # A feature that the table lacks is the parameter of the same name. An empty text stands for the feature's value.
            parameter, shown = _table()["shown_by"].get(name, (name, ""))
            yield parameter, shown or value


@functools.cache
def _table() -> Any:
    return read_json(PROFILES)


@functools.cache
def profiles() -> Mapping[str, Profile]:
    found = {}
    for key, engine in _table()["engines"].items():
        of_functions = engine.pop("functions").items()
        rows = {names: {name: Parameter(*row) for name, row in rows.items()} for names, rows in of_functions}
        found[key] = Profile(**engine, functions=rows)
    return found
