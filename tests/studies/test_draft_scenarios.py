"""Names of draft scenarios, and the batches that they make."""

import pytest
import torch

from lab.metadata.engine.forward_mode import ForwardMode
from lab.workloads.traces import TracedRequest
from studies.draft_scenarios import (
    DraftCase,
    DraftScenario,
    build_verify,
    draft_decode,
    draft_scenario,
    is_draft_scenario,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kv_indices/serial/8x80k", DraftScenario("kv_indices", ("serial",), DraftCase((81920,) * 8))),
        ("kv_indices/spread/2x100/steps5", DraftScenario("kv_indices", ("spread",), DraftCase((100, 100), 5))),
        (
            "draft_steps/mla_with_offset/one_launch/1x1k/eager",
            DraftScenario("draft_steps", ("mla_with_offset", "one_launch"), DraftCase((1024,)), eager=True),
        ),
        (
            "forward_metadata/iteration/1x7/steps2",
            DraftScenario("forward_metadata", ("iteration",), DraftCase((7,), 2)),
        ),
    ],
)
def test_a_name_says_what_it_is(name: str, expected: DraftScenario) -> None:
    assert draft_scenario(name) == expected
    assert is_draft_scenario(name)


def test_lengths_are_drawn_from_a_trace() -> None:
    trace = [TracedRequest(0.0, 500 + i, 1000) for i in range(4)]
    (lens, same) = (draft_scenario("kv_indices/serial/trace3", trace).case.prefix_lens for _ in range(2))
    assert len(lens) == 3
    assert lens == same
    assert all(500 <= length <= 1503 for length in lens)
    assert draft_scenario("kv_indices/serial/trace3").case.prefix_lens != lens  # the lab's own trace


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kv_index/serial/8x80k", "no kind of draft scenario is called 'kv_index'"),
        ("kv_indices/fast/8x80k", "'fast' is none of serial, token_blocks, spread"),
        ("kv_indices/serial", "2 parts at least, this name has 1"),
        ("draft_steps/mha/8x80k", "3 parts at least, this name has 2"),
        ("kv_indices/serial/8q80k", "'8q80k' is not <count>x<tokens>"),
        ("kv_indices/serial/8x80k/eager", "no option of kv_indices is called 'eager'"),
        ("kv_indices/serial/8x80k/steps2/steps3", "option 'steps3' sets num_steps, and so does one before it"),
        ("kv_indices/serial/0x80k", "at least one request"),
        ("kv_indices/serial/1x132k", "does not fit into max_context_len=135168"),
    ],
)
def test_a_damaged_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"scenario {name!r}.*{message}"):
        draft_scenario(name)


def test_a_case_becomes_a_verify_and_a_decode_batch_with_room_for_the_draft() -> None:
    verify, pool = build_verify(DraftCase((63, 1, 64), 3, page_size=64), CPU)
    assert verify.forward_mode is ForwardMode.TARGET_VERIFY
    assert verify.num_tokens == 3 * 4
    assert verify.seq_lens.tolist() == [63, 1, 64]
    rows = verify.req_pool_indices.tolist()
    drafted = [pool.slots(row, length, length + 4).tolist() for row, length in zip(rows, (63, 1, 64), strict=True)]
    assert verify.out_cache_loc.view(3, 4).tolist() == drafted
    decode = draft_decode(verify)
    assert decode.forward_mode is ForwardMode.DECODE
    assert decode.out_cache_loc.tolist() == [slots[0] for slots in drafted]
