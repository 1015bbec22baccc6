"""Read the features of a case of any check. `FEATURES` has the words of every feature for the text of a rule."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from lab.checks.explain.batch_features import OF_BATCH, OF_REQUEST, CallFeatures, Read, kept
from lab.checks.explain.call_features import OF_CALL, OF_EARLIER, OF_TENSORS
from lab.checks.explain.feature import CaseFeature, Choice, Condition, Features, Number
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.forward_mode import ForwardMode, UncountedTokens
from lab.workloads.attention_case import AttentionCase

SETTING = 4  # cost of a setting of a case that the function's caller does not see
# Fields of a case that are no features, and those whose features are of the batch and of its requests.
NO_FEATURES = ("interface", "arithmetic", "values", "seed", "page_seed", "path", "number", "time")
LENGTHS = ("kv_lens", "q_lens", "prefix_lens", "lens", "rows")

# Of the fields of a case, where their names are not those of features of a call.
OF_FIELDS: dict[str, CaseFeature] = {
    "contents": Choice("the kind of numbers", 0.6),
    "dead": Choice("the content of cells that no request owns", 0.6),
    "table_tail": Choice("the content of unused columns of the page table", 0.8),
    "mode": Choice("the forward mode", 0.6),
    "forward_mode": Choice("the forward mode", 0.6),
    "draft_step": Number("the draft step is {}", 0.7),
    "sliding_window": Condition("the layer has {a|no} sliding window", 0.8),
    "attention": Choice("the attention of a draft step", 0.8),
    "num_heads": Number("the number of heads is {}", 0.9),
    "topk": Number("topk is {}", 0.5),
    "num_steps": Number("num_steps is {}", 0.5),
    "positions_differ": Condition("positions are {not |}the prefix lengths", 0.5),
    "window_size": Number("window_size is {}", 0.5),
    "sink_size": Number("sink_size is {}", 0.5),
    "entries_are_pages": Condition("entries of req_to_token are {pages|slots}", 0.5),
    "translated": Condition("v2p is {|not }given", 0.5),
    "spare_capacity": Number("the spare capacity of a list is {}", 0.8),
    "sequence": Choice("the sequence of replays", 0.8),
    "layer": Choice("the layer of the model", 0.8),
    "replay": Number(
        "the call is replay {} of a CUDA graph", 0.5, several="the call is a later replay of a CUDA graph"
    ),
    "place": Choice("the place where the metadata is rebuilt", 0.8),
    "chunk": Number("the chunk size is {}", SETTING),
    "context_parallel": Number("the number of context-parallel GPUs is {}", SETTING),
    "dcp_size": Number("the number of decode-context-parallel GPUs is {}", SETTING),
    "decode_splits": Number("the number of decode calls of a pass is {}", SETTING),
    "draft_extend": Choice("the call of a draft extend", SETTING),
    "dtypes": Choice("the dtype of the integers", SETTING),
    "encoder_only": Condition("the layer is {|not }encoder-only", SETTING),
    "first_cell": Number("the first cell of each tensor is {}", SETTING),
    "first_page": Number("the first page in use is {}", SETTING),
    "gaps_in_scale_factors": Condition("scale factors {have|do not have} gaps", SETTING),
    "geometry": Choice("the geometry", SETTING),
    "kv_lora_rank": Number("kv_lora_rank is {}", SETTING),
    "layout": Choice("the pool's layout", SETTING),
    "num_draft_tokens": Number("the number of draft tokens is {}", SETTING),
    "num_padding_requests": Number("the number of padding requests is {}", SETTING),
    "num_padding_rows": Number("the number of padding rows is {}", SETTING),
    "num_pages": Number("the number of pages of a request is {}", SETTING),
    "num_tokens_per_req": Number("num_tokens_per_req is {}", SETTING),
    "offsets": Condition("row offsets are {|not }given", SETTING),
    "padded_seq_len": Number("the padded seq_lens are {}", SETTING),
    "qk_rope_head_dim": Number("qk_rope_head_dim is {}", SETTING),
    "query_dtype": Choice("the dtype that the query is cast to", SETTING),
    "repeated": Condition("requests have {the same row|different rows} of req_to_token", SETTING),
    "row_gap": Number("the gap between rows of req_to_token is {}", SETTING),
    "spare_boundaries": Number("the number of spare boundaries is {}", SETTING),
    "spare_columns": Number("the number of spare columns is {}", SETTING),
    "split_mixed_tail": Condition("the tail of a mixed batch is {|not }split off", SETTING),
    "stacked": Condition("K and V are {|not }stacked in one tensor", SETTING),
    "tensor_parallel": Number("the number of tensor-parallel GPUs is {}", SETTING),
    "virtual_slots": Condition("the slots are {virtual|physical}", SETTING),
}
OF_MODE: dict[str, CaseFeature] = {
    "leaves_out_tokens": Condition("seq_lens {leaves out tokens of the pass|counts all tokens}", 0.5),
    "uncounted": Choice("the kind of tokens that seq_lens leaves out", 0.8),
    "query_rows": Choice("the kind of query rows", 1),
    "extends_draft": Condition("the forward mode {extends|does not extend} a draft", 0.8),
}
# Where no other feature says where a result is wrong.
OF_RESULT: dict[str, CaseFeature] = {"result": Choice("the name of the result", 5, is_negated=False)}
TABLES = (OF_REQUEST, OF_BATCH, OF_TENSORS, OF_CALL, OF_FIELDS, OF_MODE, OF_EARLIER, OF_RESULT)
FEATURES = {name: feature for table in TABLES for name, feature in table.items()}


class UnknownFeatureError(LookupError):
    """No feature has this name. Each field of a case and each argument of a call needs a row in a table of features."""


def feature_named(name: str) -> CaseFeature:
    """Return the feature with this name. A name "parameter=value" stands for the condition that a configuration's parameter has
    this value, which is not its default.

    Raises:
        UnknownFeatureError: no feature has the name.
    """
    if name in FEATURES:
        return FEATURES[name]
    parameter, is_parameter, value = name.partition("=")
    if not is_parameter:
        raise UnknownFeatureError(f"no feature has the name {name!r}: add a row to a table of lab.checks.explain")
    return Condition(f"{parameter} is {{|not }}{value}", SETTING)


def features_of_case(case: Any) -> CallFeatures:
    """Return the features of a case of any check: of its fields, its forward mode, its batch and each of its requests.

    Raises:
        UnknownFeatureError: a field of the case has no row in a table.
    """
    given = dict(_fields(case))
    for name in given:
        feature_named(name)
    model = getattr(case, "model", None)

    def value_of(name: str) -> Any:
        return getattr(case, name, getattr(model, name, given.get(name)))

    group = value_of("group") or 0
    of_tensors = {name: value_of(name) for name in OF_TENSORS} | {
        "function": value_of("interface"),
        "group_no_power_of_2": group & (group - 1) > 0,
        "sinks": bool(getattr(case, "sinks", getattr(model, "has_sinks", False))),
    }
    found = kept(given, given) | kept(OF_TENSORS, of_tensors) | kept(OF_MODE, _read_mode(given))
    found |= {f"{name}={value}": True for name, value in getattr(case, "non_default", {}).items()}
    kv_lens = getattr(case, "kv_lens", getattr(case, "lens", None))
    if kv_lens is None:
        return CallFeatures(found)
    q_lens = getattr(case, "q_lens", (0,) * len(kv_lens))
    of_storage = {name: getattr(case, name) for name in ("page_size", "window_left") if hasattr(case, name)}
    return CallFeatures.of_lengths(found, kv_lens, q_lens, **of_storage)


def _fields(case: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each field of a case and of dataclasses in it, without lengths and `NO_FEATURES`."""
    for each in fields(case) if is_dataclass(case) else ():
        value = getattr(case, each.name)
        if is_dataclass(value):
            yield from _fields(value)
        elif each.name not in NO_FEATURES + LENGTHS:
            yield each.name, value


def _read_mode(given: Read) -> Read:
    """Return the features of the forward mode in a case's fields, such as the kind of its query rows; {} without a mode."""
    mode = next((each for each in given.values() if isinstance(each, ForwardMode)), None)
    if mode is None:
        return {}
    uncounted = mode.uncounted
    if uncounted is UncountedTokens.DRAFT_STEP and given.get("draft_step") in (None, FROZEN_KV_STEP):
        uncounted = UncountedTokens.NONE  # the first token of a draft, or a step whose K and V are frozen
    return {
        "leaves_out_tokens": uncounted is not UncountedTokens.NONE,
        "uncounted": uncounted,
        "query_rows": mode.query_rows,
        "extends_draft": mode.extends_draft,
    }


def features_of_contents(case: AttentionCase) -> Features:
    """Return what an attention case's tensors contain: kind of numbers, numbers in unread cells, and the table's unused
    columns.
    """
    storage = case.storage
    read = {"contents": case.contents, "dead": storage.dead, "table_tail": storage.table_tail}
    return kept(read, read)
