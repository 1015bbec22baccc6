"""Conditions of known failures: whether one explains a sentence about a case.

Each takes the case and the sentence of `lab.checks.case_run.CaseRun.expect_close` that says what was wrong.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from lab.calls.problem import E4M3
from lab.checks.parameters.configuration import Configuration
from lab.checks.parameters.paged_shape import attention_case
from lab.checks.parameters.values import Mask, Sinks
from lab.metadata.engine.forward_mode import ForwardMode
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Contents
from lab.workloads.interfaces import Interface

Condition = Callable[[Any, str], bool]  # of a case and a sentence of what was wrong with it

LEAST_KEYS_OF_FA2 = 32  # of its tiles of keys


def wrong_requests(sentence: str) -> list[int]:
    """The requests that a sentence of `lab.checks.case_run.CaseRun.expect_close` names."""
    named = re.search(r"of requests \[([0-9, ]*)\]", sentence)
    return [int(number) for number in named.group(1).split(",") if number.strip()] if named else []


def lens_of(case: AttentionCase | Configuration) -> AttentionCase:
    """Return the case that has the lengths of each request."""
    return attention_case(case, Ranges()) if isinstance(case, Configuration) else case


def all_wrong(
    case: AttentionCase, sentence: str, is_so: Callable[[int], bool], *, some_if_unnamed: bool = False
) -> bool:
    """Return whether each request that a sentence names is so; where it names none, whether some request of the case is.

    Without `some_if_unnamed` a sentence that names none is not explained.
    """
    requests = wrong_requests(sentence)
    if requests:
        return all(map(is_so, requests))
    return some_if_unnamed and any(map(is_so, range(len(case.kv_lens))))


def only_fewer_keys_than_rows(
    case: AttentionCase | Configuration, sentence: str, *, some_if_unnamed: bool = False
) -> bool:
    """All that is wrong belongs to requests with fewer keys than query rows."""
    lens = lens_of(case)
    seen = getattr(lens, "seen_lens", lens.kv_lens)  # of a pass, whose rows may see fewer keys than there are
    return all_wrong(
        lens, sentence, lambda request: seen[request] < lens.q_lens[request], some_if_unnamed=some_if_unnamed
    )


def has_fewer_keys_than_rows(case: AttentionCase | Configuration, sentence: str) -> bool:
    """Some request of the case has fewer keys than query rows."""
    case = lens_of(case)
    return any(kv_len < q_len for kv_len, q_len in zip(case.kv_lens, case.q_lens, strict=True))


def only_without_keys(case: AttentionCase | Configuration, sentence: str) -> bool:
    """All that is wrong belongs to requests without a key."""
    lens = lens_of(case)
    return all_wrong(lens, sentence, lambda request: lens.kv_lens[request] == 0)


def has_no_keys(case: AttentionCase | Configuration, sentence: str) -> bool:
    """Some request of the case has no key."""
    return 0 in lens_of(case).kv_lens


def only_rows_before_the_first_tile(case: AttentionCase | Configuration, sentence: str) -> bool:
    """All that is wrong belongs to requests with fewer keys than rows, and keys for a tile that FA2 leaves unmasked.

    Some request is one where none is named.
    """
    lens = lens_of(case)
    return all_wrong(
        lens,
        sentence,
        lambda request: LEAST_KEYS_OF_FA2 <= lens.kv_lens[request] < lens.q_lens[request],
        some_if_unnamed=True,
    )


def several_rows(case: Any, sentence: str) -> bool:
    """The wrong call is a decode call with several rows for each request; K11 puts four under a mask in any case."""
    mode = getattr(case, "mode", None)
    if mode is not None:  # of a pass, or of a graph
        return getattr(mode, "forward_mode", mode) in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)
    case = lens_of(case)
    return is_decode(case, sentence) and (max(case.q_lens) > 1 or bool(re.search("mask .*of [0-9]+ rows", sentence)))


def window_over_several_rows(case: Any, sentence: str) -> bool:
    """The wrong call has a window and several rows for each request."""
    windowed = getattr(case, "sliding_window", False) or getattr(case, "window_left", -1) >= 0
    if isinstance(case, Configuration):
        windowed = case.get("window_left", -1) >= 0
    return several_rows(case, sentence) and bool(windowed or re.search(r"\bwindow", sentence))


def mask_over_e4m3(case: Any, sentence: str) -> bool:
    """The wrong call has an e4m3 cache and a draft mask that is not causal."""
    replayed = "^(the first replay|a replay|an eager call between)"  # of K9, which gives several rows a tree's mask
    is_masked = bool(re.search(f"^(?!causal|no mask).*mask .*of [0-9]+ rows|{replayed}", sentence))
    if isinstance(case, Configuration):
        is_masked = case.get("mask", Mask.NONE) not in (Mask.NONE, Mask.CAUSAL)
    return getattr(lens_of(case), "kv_dtype", None) == E4M3 and is_masked and several_rows(case, sentence)


def only_where_a_mask_hides_every_key(case: Any, sentence: str) -> bool:
    """All that is wrong belongs to requests without a token before their rows, and a draft mask hides each row from itself."""
    hides = isinstance(case, Configuration) and case.get("mask", Mask.NONE) == Mask.OWN_BIT_CLEAR
    lens = lens_of(case)
    return hides and all_wrong(lens, sentence, lambda request: lens.kv_lens[request] <= lens.q_lens[request])


def has_sinks(case: AttentionCase | Configuration, sentence: str) -> bool:
    return case.get("sinks", Sinks.NONE) != Sinks.NONE if isinstance(case, Configuration) else case.sinks


def sink_of_minus_infinity_and_fewer_keys_than_rows(case: AttentionCase | Configuration, sentence: str) -> bool:
    """Some sink is minus infinity, and all that is wrong belongs to requests with fewer keys than rows, if any is named."""
    some = (
        case.get("sinks") == Sinks.SOME_MINUS_INFINITY
        if isinstance(case, Configuration)
        else "minus infinity" in sentence
    )
    return some and only_fewer_keys_than_rows(case, sentence, some_if_unnamed=True)


def unscaled_e4m3_shows(case: AttentionCase | Configuration, sentence: str) -> bool:
    """The cache is e4m3, and logits climb, keys have little weight, or K11 makes logits large."""
    case = lens_of(case)
    shows = case.contents in (Contents.TALL, Contents.SHADED)
    large = re.search("^(bmm1_scale below 0|rows whose logits are far apart): ", sentence)
    return case.kv_dtype == E4M3 and (shows or bool(large))


def has_window(case: AttentionCase, sentence: str) -> bool:
    return case.window_left >= 0


def is_decode(case: AttentionCase, sentence: str) -> bool:
    return case.interface is Interface.DECODE


def is_context(case: AttentionCase, sentence: str) -> bool:
    return case.interface is Interface.CONTEXT


def has_low_logits(case: AttentionCase, sentence: str) -> bool:
    return case.contents is Contents.LOW


def is_one_row_over_e4m3(case: AttentionCase, sentence: str) -> bool:
    return case.kv_dtype == E4M3 and case.q_lens[0] == 1


def is_fp16(case: AttentionCase, sentence: str) -> bool:
    return case.dtype == torch.float16


def has_a_kv_head_per_query_head(case: AttentionCase, sentence: str) -> bool:
    return case.group == 1
