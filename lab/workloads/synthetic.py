"""Draw the lab's synthetic trace of requests, which is the same on every machine.

Lengths are unequal with a heavy tail. The distributions are not fitted to any service.

    arrivals   Poisson, 20 a second
    prompts    log-normal, median 1,000 tokens, sigma 1.2, clipped to 16 to 120,000
    answers    log-normal, median 250 tokens, sigma 0.9, clipped to 4 to 4,000
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import NormalDist

from lab.workloads.traces import TracedRequest

PATH = Path(__file__).parent / "data" / "synthetic_chat.jsonl"
NUM_REQUESTS = 1000
SEED = 1
MEAN_GAP_MS = 50.0


def synthetic_chat(num_requests: int = NUM_REQUESTS, seed: int = SEED) -> list[TracedRequest]:
    random = Random(seed)
    requests, arrival_ms = [], 0.0
    for _ in range(num_requests):
        arrival_ms += -math.log(1.0 - random.random()) * MEAN_GAP_MS
        prompt_tokens = _log_normal(random.random(), median=1000, sigma=1.2, least=16, most=120_000)
        answer_tokens = _log_normal(random.random(), median=250, sigma=0.9, least=4, most=4_000)
        requests.append(TracedRequest(float(round(arrival_ms)), prompt_tokens, answer_tokens))
    return requests


def _log_normal(uniform: float, median: float, sigma: float, least: int, most: int) -> int:
    # inv_cdf rejects 0 and 1. Draws of `Random.random` are multiples of 2**-53, so that only the draw 0 is changed.
    deviation = NormalDist().inv_cdf(max(uniform, 2.0**-53))
    return min(max(round(median * math.exp(sigma * deviation)), least), most)


def as_mooncake(requests: Sequence[TracedRequest]) -> str:
    rows = (
        {"timestamp": round(each.arrival_ms), "input_length": each.input_length, "output_length": each.output_length}
        for each in requests
    )
    return "".join(json.dumps(row) + "\n" for row in rows)
