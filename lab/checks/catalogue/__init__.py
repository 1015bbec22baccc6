"""The catalogue: each module is one check, and says what it catches that random data would not show."""

import importlib

from lab.checks.check import Check

MODULES = (
    "k01_oracle",
    "k02_finite",
    "k03_coded",
    "k04_poison",
    "k05_guards",
    "k06_workspace",
    "k07_batch",
    "k08_decomposition",
    "k09_replay",
    "k10_metamorphic",
    "k11_sensitivity",
    "k12_determinism",
    "k13_boundaries",
    "k14_interleaving",
    "k15_large_ids",
    "k16_metadata",
    "k17_mla_metadata",
    "draft_lists",
    "forward_modes",
    "mla_modes",
    "mla_prefill",
)


def checks() -> tuple[Check, ...]:
    """All checks, in the catalogue's order."""
    return tuple(importlib.import_module(f"{__name__}.{module}").CHECK for module in MODULES)
