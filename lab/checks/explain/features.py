"""Read the features of a case of any check. `FEATURES` has the words of every feature for the text of a rule."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from lab.checks.explain.batch_features import OF_BATCH, OF_REQUEST, CallFeatures, Read, kept
from lab.checks.explain.call_features import OF_CALL, OF_EARLIER, OF_TENSORS
from lab.checks.explain.feature import CaseFeature, Choice, Condition, Cost, Number
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.forward_mode import ForwardMode, UncountedTokens
from lab.workloads.attention_case import Contents, Dead, Entries, HeadPages, TableTail

# Fields of a case that are no features, and those whose features are of the batch and of its requests.
NO_FEATURES = ("interface", "arithmetic", "values", "seed", "page_seed", "path", "number", "time")
LENGTHS = ("kv_lens", "q_lens", "prefix_lens", "lens", "rows")

# Of the fields of a case, where their names are not those of features of a call.
OF_FIELDS: dict[str, CaseFeature] = {
    "contents": Choice("the data of the case", Cost.VALUE, Contents),
    "dead": Choice("the lab's poison in cells that no request owns", Cost.VALUE, Dead),
    "table_tail": Choice("the content of unused columns of the page table", Cost.VALUE, TableTail),
    "entries": Choice("the entries that rows select", Cost.VALUE, Entries),
    "head_pages": Choice("the pages that K/V heads select", Cost.VALUE, HeadPages),
    "mode": Choice("the forward mode", Cost.VALUE),
    "forward_mode": Choice("the forward mode", Cost.VALUE),
    "draft_step": Number("the draft step is {}", Cost.VALUE),
    "sliding_window": Condition("the layer has {a|no} sliding window", Cost.VALUE),
    "attention": Choice("the attention of a draft step", Cost.VALUE),
    "num_heads": Number("the number of heads is {}", Cost.DERIVED),
    "topk": Number("topk is {}", Cost.VALUE),
    "num_steps": Number("num_steps is {}", Cost.VALUE),
    "positions_differ": Condition("positions are {not |}the prefix lengths", Cost.VALUE),
    "window_size": Number("window_size is {}", Cost.VALUE),
    "sink_size": Number("sink_size is {}", Cost.VALUE),
    "entries_are_pages": Condition("entries of req_to_token are {pages|slots}", Cost.VALUE),
    "translated": Condition("v2p is {|not }given", Cost.VALUE),
    "spare_capacity": Number("the spare capacity of a list is {}", Cost.VALUE),
    "sequence": Choice("the sequence of replays", Cost.VALUE),
    "layer": Choice("the layer of the model", Cost.VALUE),
    "replay": Number(
        "the call is replay {} of a CUDA graph", Cost.VALUE, several="the call is a later replay of a CUDA graph"
    ),
    "place": Choice("the place where the metadata is rebuilt", Cost.VALUE),
    "chunk": Number("the chunk size is {}", Cost.SETTING),
    "compress_ratio": Number("compress_ratio is {}", Cost.SETTING),
    "context_parallel": Number("the number of context-parallel GPUs is {}", Cost.SETTING),
    "dcp_size": Number("the number of decode-context-parallel GPUs is {}", Cost.SETTING),
    "decode_splits": Number("the number of decode calls of a pass is {}", Cost.SETTING),
    "draft_extend": Choice("the call of a draft extend", Cost.SETTING),
    "decode_threshold": Number("the most rows of a request in vLLM's decode call are {}", Cost.SETTING),
    "dtypes": Choice("the dtype of the integers", Cost.SETTING),
    "encoder_only": Condition("the layer is {|not }encoder-only", Cost.SETTING),
    "engine": Choice("the engine that makes the pass", Cost.SETTING),
    "first_cell": Number("the first cell of each tensor is {}", Cost.SETTING),
    "first_page": Number("the first page in use is {}", Cost.SETTING),
    "one_far": Condition("{|not }one of the used pages alone lies far from the others", Cost.SETTING),
    "gaps_in_scale_factors": Condition("scale factors {have|do not have} gaps", Cost.SETTING),
    "geometry": Choice("the geometry", Cost.SETTING),
    "index_topk": Number("the most positions that an indexer selects are {}", Cost.SETTING),
    "kv_lora_rank": Number("kv_lora_rank is {}", Cost.SETTING),
    "layout": Choice("the pool's layout", Cost.SETTING),
    "num_draft_tokens": Number("the number of draft tokens is {}", Cost.SETTING),
    "num_padding_requests": Number("the number of padding requests is {}", Cost.SETTING),
    "num_padding_rows": Number("the number of padding rows is {}", Cost.SETTING),
    "num_pages": Number("the number of pages of a request is {}", Cost.SETTING),
    "num_tokens_per_req": Number("num_tokens_per_req is {}", Cost.SETTING),
    "offsets": Condition("row offsets are {|not }given", Cost.SETTING),
    "padded_seq_len": Number("the padded seq_lens are {}", Cost.SETTING),
    "qk_rope_head_dim": Number("qk_rope_head_dim is {}", Cost.SETTING),
    "query_dtype": Choice("the dtype that the query is cast to", Cost.SETTING),
    "repeated": Condition("requests have {the same row|different rows} of req_to_token", Cost.SETTING),
    "row_gap": Number("the gap between rows of req_to_token is {}", Cost.SETTING),
    "spare_boundaries": Number("the number of spare boundaries is {}", Cost.SETTING),
    "spare_columns": Number("the number of spare columns is {}", Cost.SETTING),
    "split_mixed_tail": Condition("the tail of a mixed batch is {|not }split off", Cost.SETTING),
    "stacked": Condition("K and V are {|not }stacked in one tensor", Cost.SETTING),
    "tensor_parallel": Number("the number of tensor-parallel GPUs is {}", Cost.SETTING),
    "virtual_slots": Condition("the slots are {virtual|physical}", Cost.SETTING),
}
OF_MODE: dict[str, CaseFeature] = {
    "leaves_out_tokens": Condition("seq_lens {leaves out tokens of the pass|counts all tokens}", Cost.VALUE),
    "uncounted": Choice("the kind of tokens that seq_lens leaves out", Cost.VALUE),
    "query_rows": Choice("the kind of query rows", Cost.DERIVED),
    "extends_draft": Condition("the forward mode {extends|does not extend} a draft", Cost.VALUE),
}
# Where no other feature says where a result is wrong.
OF_RESULT: dict[str, CaseFeature] = {"result": Choice("the name of the result", Cost.SETTING, is_negated=False)}
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
    return Condition(f"{parameter} is {{|not }}“{value}”", Cost.SETTING)


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

    read = given | {name: value_of(name) for name in OF_TENSORS} | _read_mode(given)
    group = read["group"] or 0
    read |= {
        "function": value_of("interface"),
        "group_no_power_of_2": group & (group - 1) > 0,
        "sinks": bool(getattr(case, "sinks", getattr(model, "has_sinks", False))),
    }
    read |= {f"{name}={value}": True for name, value in getattr(case, "non_default", {}).items()}
    kv_lens = getattr(case, "kv_lens", getattr(case, "lens", None))
    if kv_lens is None:
        return CallFeatures(kept(read, read))
    q_lens = getattr(case, "q_lens", (0,) * len(kv_lens))
    of_storage = {name: getattr(case, name) for name in ("page_size", "window_left") if hasattr(case, name)}
    return CallFeatures.of_lengths(read, kv_lens, q_lens, **of_storage)


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
