"""590 wrong kernels and six right ones, written from the documented calls alone by writers who had not seen the judge.

[results/blind.md](../../results/blind.md) says which were found as they were handed over; number 149 there is `Blind149` here. A
wrong kernel is a class over one right model (`corpus.blind.model`, `corpus.blind.lists_model`), or holds functions of its own; its
docstring says the defect, and `trigger` which calls come out wrong.

    lab judge corpus/blind/decode_1.py:Blind1
    python -m corpus.blind --workers 32
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

NAMES = {
    "decode_of": "trtllm_batch_decode_with_kv_cache",
    "context_of": "trtllm_batch_context_with_kv_cache",
    "mla_of": "trtllm_batch_decode_with_kv_cache_mla",
    "ragged_of": "trtllm_ragged_attention_deepseek",
    "lists_of": "generate_draft_decode_kv_indices",
    "window_lists_of": "generate_draft_decode_kv_indices",
}
Maker = Callable[[Any], Callable[..., Any]]  # of the models' modules: makes a function of a model


def right(*makers: Maker) -> Callable[[type[Any]], type[Any]]:
    """Make an implementation of a class, with the functions that the makers make of it."""

    def made(cls: type[Any]) -> type[Any]:
        for maker in makers:
            setattr(cls, NAMES[maker.__name__], staticmethod(maker(cls())))
        return cls

    return made


def wrong(*makers: Maker, trigger: str) -> Callable[[type[Any]], type[Any]]:
    """Make a wrong implementation of a class.

    Args:
        makers: as of `right`; none where the class holds its functions.
        trigger: the calls that come out wrong.
    """

    def made(cls: type[Any]) -> type[Any]:
        cls.trigger = trigger
        return right(*makers)(cls)

    return made


def kernels() -> dict[str, type[Any]]:
    """Return every wrong kernel by the name that `lab judge` loads it by."""
    found = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        if not module.name.endswith("__main__"):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, type) and "trigger" in vars(value):
                    found[f"{module.name}:{name}"] = value
    return found
