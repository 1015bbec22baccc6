"""A builder that changes its batch in place is judged by the batch that it was given, and the verdict says what it changed."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lab.kernels
import lab.metadata
import lab.references
from corpus.kernels import kernel
from lab.checks.explain.call_features import features_of_case
from lab.checks.parameters.models import Configuration
from lab.checks.properties import checks_by_key, draft_lists
from lab.checks.properties.check import Level
from lab.checks.run.judging import run_case
from lab.checks.run.verdicts import Outcome
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_pool import KVPool
from lab.ranges import Ranges
from lab.workloads.inputs.draft_lists import DraftLists, DraftListsCase
from lab.workloads.interfaces import MetadataFunction, interface_of

# The wrong builders by name: the tensors that they change, and the checks that judge them.
CHANGED = {
    "draft_added_to_batch": ({"ForwardBatch.seq_lens"}, ("K16", "K18")),
    "row_cleared_in_pool": ({"KVPool.req_to_token"}, ("K18",)),
    # A padded batch has one tensor for both.
    "accepted_tokens_summed_in_place": ({"SpecInfo.num_accept_tokens", "ForwardBatch.extend_seq_lens"}, ("K18",)),
    "mla_lengths_counted_in_place": ({"ForwardBatch.seq_lens"}, ("K17", "K18")),
    "mla_prefix_taken_from_batch": ({"ForwardBatch.seq_lens"}, ("K18",)),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, (_, keys) in CHANGED.items() for key in keys])
def test_the_verdict_names_what_a_builder_changed_and_nothing_else(name: str, key: str) -> None:
    wrong, changed = kernel(name), CHANGED[name][0]
    check = checks_by_key()[key]
    cases = check.cases(interface_of(wrong.interface[0]), Ranges(), Level.SMOKE)
    judged = (run_case(wrong.implementation(), check, case, torch.device("cpu"), Ranges()) for case in cases)
    found = next(each.wrongs for each in judged if each.wrongs)
    assert {each.split(" changed ")[1] for each in found} == changed, found


@pytest.mark.parametrize(
    ("interface", "kernels"),
    [(MetadataFunction.DRAFT_KV_INDICES, lab.kernels), (MetadataFunction.MHA_METADATA, lab.metadata)],
)
def test_a_result_has_the_features_of_the_batch_and_of_the_configuration(
    interface: MetadataFunction, kernels: Any
) -> None:
    case = Configuration(interface, {"requests": 64})
    result = run_case(kernels, checks_by_key()["K18"], case, torch.device("cpu"), Ranges()).results[0]
    assert features_of_case(case).features.items() <= result.features.items()
    assert result.features["longest_kv_len"] > 0


def test_lists_are_judged_by_the_lengths_that_were_given() -> None:
    lists = DraftLists(DraftListsCase((5, 3)))
    found = lists.wrongs(kernel("positions_of_last_step").implementation().generate_draft_decode_kv_indices)
    assert found == ["it changed positions"]
    assert lists.arguments["positions"].tolist() == [5, 3]

    def nothing(positions: torch.Tensor, **_: Any) -> None:
        positions.add_(1)

    changed, *cells = lists.wrongs(nothing)
    assert changed == "it changed positions"
    assert [each.split(" cells of ")[1].split()[0] for each in cells] == ["kv_indices", "kv_indptr"]


def test_too_little_memory_for_the_lists_is_no_failure_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far rows take 8 GiB of each of the two drafts: the memory may be enough for the first draft alone."""
    built = []

    def build(case: DraftListsCase, device: str) -> DraftLists:
        if built:
            raise torch.OutOfMemoryError("CUDA out of memory")
        built.append(case)
        return DraftLists(case, device)

    monkeypatch.setattr(draft_lists, "DraftLists", build)
    case = Configuration(MetadataFunction.DRAFT_KV_INDICES)
    judged = run_case(lab.references, checks_by_key()["K18"], case, torch.device("cpu"), Ranges())
    assert (judged.outcome, judged.by_lab, judged.wrongs) == (Outcome.DECLINED, True, ())


# Fields of each function's metadata, and the batch's tensors that they must not be.
ALIASES: dict[MetadataFunction, dict[str, str]] = {
    MetadataFunction.MHA_METADATA: {"cache_seqlens_int32": "seq_lens"},
    MetadataFunction.MLA_METADATA: {"seq_lens_k": "seq_lens", "seq_lens_q": "extend_seq_lens"},
    MetadataFunction.DSV4_METADATA: {"request_lens": "seq_lens"},
}


@pytest.mark.parametrize(
    ("function", "field"), [(function, field) for function in ALIASES for field in ALIASES[function]]
)
def test_metadata_that_shares_a_tensor_with_its_batch_is_wrong(function: MetadataFunction, field: str) -> None:
    name = ALIASES[function][field]

    def build(batch: ForwardBatch, pool: KVPool, *arguments: Any, **options: Any) -> Any:
        metadata = getattr(lab.metadata, function.value)(batch, pool, *arguments, **options)
        own, of_batch = getattr(metadata, field), getattr(batch, name)
        is_alike = (
            own is not None and of_batch is not None and of_batch.dtype == own.dtype and torch.equal(own, of_batch)
        )
        return replace(metadata, **{field: of_batch}) if is_alike else metadata

    key = "K16" if function is MetadataFunction.MHA_METADATA else "K17"
    check = checks_by_key()[key]
    judged = (
        run_case(SimpleNamespace(**{function.value: build}), check, case, torch.device("cpu"), Ranges())
        for case in check.cases(function, Ranges(), Level.SMOKE)
    )
    found = next(each.wrongs for each in judged if each.wrongs)
    sentence = rf"the metadata's \w+\.{field} changed with ForwardBatch\.{name}"
    assert all(re.fullmatch(sentence, each) for each in found), found
