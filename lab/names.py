"""Name the judge's checks, functions and engines. The commands look these names up before they import torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from lab.files import read_json
from lab.named_enum import NamedEnum

Named = TypeVar("Named")

PROFILES = Path(__file__).parent / "checks" / "parameters" / "profiles.json"
_OF_K = (
    *("oracle", "finite", "coded", "poison", "guards", "workspace", "batch", "decomposition", "replay", "metamorphic"),
    *("sensitivity", "determinism", "boundaries", "interleaving", "large_ids", "metadata", "mla_metadata"),
    "combinations",
)
CHECKS = {f"K{number}": name for number, name in enumerate(_OF_K, 1)} | {
    "L1": "draft_lists",
    "M1": "forward_modes",
    "M2": "mla_modes",
    "M3": "mla_prefill",
    "S1": "graph_stories",
    "S2": "mla_stories",
    "R1": "recorded_calls",
}
BY_CALLS = "R1"  # the check of `lab judge --calls`, which --only does not name


class AttentionCall(NamedEnum):
    """FlashInfer's attention functions that the lab can judge. The value is the function's name."""

    DECODE = "trtllm_batch_decode_with_kv_cache"
    CONTEXT = "trtllm_batch_context_with_kv_cache"
    MLA_DECODE = "trtllm_batch_decode_with_kv_cache_mla"  # after absorption, over the paged cache
    RAGGED_CONTEXT = "trtllm_ragged_attention_deepseek"  # before absorption, over the new tokens alone
    DSV4_DECODE = "trtllm_batch_decode_sparse_mla_dsv4"  # over selected entries of two pools


class MetadataFunction(NamedEnum):
    """Functions of an engine that make the metadata of attention calls for a batch. The value is the function's name."""

    DRAFT_KV_INDICES = "generate_draft_decode_kv_indices"
    MHA_METADATA = "build_mha_metadata"
    MLA_METADATA = "build_mla_decode_metadata"
    MLA_PREFILL = "build_mla_prefill_metadata"
    DSV4_METADATA = "build_dsv4_metadata"


# Calls over latent entries: an entry is both key and value. Their query may have an axis of requests.
LATENT_CALLS = (AttentionCall.MLA_DECODE, AttentionCall.DSV4_DECODE)
Interface = AttentionCall | MetadataFunction
INTERFACES: tuple[Interface, ...] = (*AttentionCall, *MetadataFunction)


def of_name(name: Named | str, named: Mapping[Named, tuple[str, ...]], kind: str) -> Named:
    """Return the key of `named` whose tuple of names contains `name`. Raise ValueError if there is none. `kind` is the word for
    a key in the error message, such as "check".
    """
    for each, names in named.items():
        if name in (each, *names, names[0].lower()):
            return each
    raise ValueError(f"there is no {kind} {name!r}; there are {', '.join(map(' or '.join, named.values()))}")


def check_key(text: str) -> str:
    """Return the key of the check with this key or name: "K1" for "K1" and for "oracle". Raise ValueError if there is none."""
    return of_name(text, {key: (key, name) for key, name in CHECKS.items() if key != BY_CALLS}, "check")


def functions_named(names: Iterable[str]) -> tuple[Interface, ...]:
    """Return the functions with these names, or all functions if `names` is empty. A name is short, such as "decode", or the
    full name, such as "trtllm_batch_decode_with_kv_cache".
    """
    named = {each: (each.name.lower(), each.value) for each in INTERFACES}
    return tuple(of_name(name, named, "function") for name in names) or INTERFACES


def function_name(text: str) -> str:
    functions_named([text])
    return text


def profile_name(text: str) -> str:
    engines = read_json(PROFILES)["engines"]
    if text not in engines:
        raise ValueError(f"no profile is called {text!r}: one of {', '.join(engines)}")
    return text
