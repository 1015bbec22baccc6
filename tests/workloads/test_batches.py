"""The batch grammar: what a text means, its shortest form, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.workloads import Batch, parse_batch, sweep


@pytest.mark.parametrize(
    ("text", "q_lens", "kv_lens"),
    [
        ("q2k", (2048,), (2048,)),
        ("q5", (5,), (5,)),
        ("8q1s1k", (1,) * 8, (1024,) * 8),
        ("2q2k_3q1s1k", (2048, 2048, 1, 1, 1), (2048, 2048, 1024, 1024, 1024)),
        ("2q2ks4k", (2048, 2048), (4096, 4096)),
        ("q1s2_q1s3_q1s2", (1, 1, 1), (2, 3, 2)),
        ("01q1s1024", (1,), (1024,)),
    ],
)
def test_a_text_means(text: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> None:
    batch = parse_batch(text)
    assert (batch.q_lens, batch.kv_lens) == (q_lens, kv_lens)
    assert batch.prefix_lens == tuple(kv_len - q_len for q_len, kv_len in zip(q_lens, kv_lens, strict=True))


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("1q1s1024", "q1s1k"),
        ("q2048s2k", "q2k"),
        ("q1s4k_q1s4k_q1s4k", "3q1s4k"),
        ("2q1s4k_q2k_q1s4k", "2q1s4k_q2k_q1s4k"),
        ("q1000s1025", "q1000s1025"),
    ],
)
def test_the_shortest_text(text: str, shortest: str) -> None:
    assert str(parse_batch(text)) == shortest
    assert repr(parse_batch(text)) == f"parse_batch('{shortest}')"


REQUESTS = st.lists(
    st.tuples(st.sampled_from((1, 4, 1023, 1024, 3072)), st.sampled_from((0, 1, 1020, 1024, 81919))), min_size=1
)


@settings(deadline=None, derandomize=True)
@given(REQUESTS)
def test_the_shortest_text_means_the_same_batch(requests: list[tuple[int, int]]) -> None:
    batch = Batch(tuple(new for new, _ in requests), tuple(new + cached for new, cached in requests))
    assert parse_batch(str(batch)) == batch
    assert eval(repr(batch), {"parse_batch": parse_batch}) == batch
    assert batch.prefix_lens == tuple(cached for _, cached in requests)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "group '' is not .*8q1s1k, for instance, is 8 requests"),
        ("q2k_", "group '' is not"),
        ("8q1s1k_r4", r"group 'r4' is not \[count\]q<q_len>"),
        ("8", "group '8' is not"),
        ("8q", "group '8q' is not"),
        ("q1s", "group 'q1s' is not"),
        ("q-1", "group 'q-1' is not"),
        ("q1.5k", "group 'q1.5k' is not"),
        (" q1", "group ' q1' is not"),
        ("q1\n", r"group 'q1\\n' is not"),
        ("q1m", "group 'q1m' is not"),
        ("2kq1", "group '2kq1' is not"),
        ("Q1", "group 'Q1' is not"),
        ("q٣", "group 'q٣' is not"),
        ("q1_0q1s1k", "group '0q1s1k' has no requests: the count must be 1 or more"),
        ("q1_q0", "group 'q0': q_len 0 must be 1 or more"),
        ("q0s5", "group 'q0s5': q_len 0 must be 1 or more"),
        ("q1_8q5s4", "group '8q5s4': kv_len 4 must be 5 or more: it counts the request's 5 new tokens"),
        ("q1s0", "group 'q1s0': kv_len 0 must be 1 or more"),
        ("q2ks2047", "group 'q2ks2047': kv_len 2047 must be 2048 or more"),
    ],
)
def test_a_damaged_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_batch(text)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "message"),
    [
        ((), (), "0 q_lens and 0 kv_lens: .* at least one request"),
        ((1, 1), (4,), "2 q_lens and 1 kv_lens: .* one each per request"),
        ((1, 0), (4, 4), "q_len 0 must be 1 or more"),
        ((1, 5), (4, 4), "kv_len 4 must be 5 or more"),
    ],
)
def test_a_batch_that_no_text_describes_is_refused(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Batch(q_lens, kv_lens)


def test_a_sweep_varies_its_last_argument_fastest() -> None:
    batches = sweep(num_requests=(8, 1), kv_lens=(4096, 5), q_lens=(1, 4))
    assert [str(batch) for batch in batches] == [
        *("8q1s4k", "8q4s4k", "8q1s5", "8q4s5"),
        *("q1s4k", "q4s4k", "q1s5", "q4s5"),
    ]
    assert len(sweep()) == 12
