"""Every dishonest kernel is refused as it says, and honest ones that look alike are not."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from corpus.dishonest import DECODE, forged, judging, judging_again, kernels, timing, timing_again
from corpus.dishonest.honest import CONTROLS
from lab.checks import Outcome, judge
from lab.exit_status import ExitStatus

ROOT = Path(__file__).parents[2]
SCENARIO = "decode/llama-3.1-8b/8q1s1k"


# These act after the first case, or at times of their own; of all others the first failure says how they are refused.
LATE = ("PatchesFromAThread", "TicksByGarbage", "WritesAtATimer")


def judged(kernel: str, checks: tuple[str, ...], **settings: Any) -> Any:
    """Judge a kernel's decode call in workers, on small cases."""
    settings |= {"functions": [DECODE], "ranges": judging.RANGES, "drawn": 0, "discover": False}
    return judge(kernel, only=checks, isolated=True, device="cpu", **settings)


KERNELS = [*kernels(judging), *kernels(judging_again), *kernels(forged)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_a_verdict_is_not_to_be_bought(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_SEEN", str(tmp_path))
    name, checks = f"{type(kernel).__module__}:{kernel.__name__}", getattr(kernel, "checks", ("K1",))
    most_seconds = getattr(kernel, "most_seconds", None)
    report = judged(name, checks, first_failure=kernel.__name__ not in LATE, most_seconds=most_seconds)
    assert not report.is_right
    assert report.exit_status in (ExitStatus.WRONG, ExitStatus.REFUSED)
    said = "\n".join(sentence for verdict in report.wrong for sentence in verdict.judged.wrongs)
    assert re.search(kernel.refusal.said, said), said
    if report.exit_status is ExitStatus.REFUSED:
        assert re.match(
            "Dishonest, and not judged: "
            "(the kernel is dishonest: it changed |it is called right with an error of |its worker (called|sent) )",
            report.diagnosis.sentence,
        )


def test_the_exact_kernel_is_right_and_audited() -> None:
    report = judged("corpus.dishonest.judging:exact", ("K1", "K9"))
    assert report.is_right
    assert report.audited == 8
    assert {verdict.outcome for verdict in report.verdicts} == {Outcome.RIGHT}


def compared(
    kernel: str, clock: str = "graph", samples: int = 10, scenario: str = SCENARIO
) -> "subprocess.CompletedProcess[str]":
    words = ["ab", scenario, "lab.kernels.portable", kernel, "--samples", str(samples), "--clock", clock]
    return subprocess.run(
        [sys.executable, "-m", "lab", *words], capture_output=True, text=True, cwd=ROOT, check=False, timeout=300
    )


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="times a kernel, and there is no GPU here")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kernel", [*kernels(timing), *kernels(timing_again)], ids=lambda kernel: kernel.__name__)
def test_a_time_is_not_to_be_bought(kernel: Any) -> None:
    """Each in a process of its own, which it may leave as it likes."""
    name, scenario = f"{type(kernel).__module__}:{kernel.__name__}", getattr(kernel, "scenario", SCENARIO)
    done = compared(name, getattr(kernel, "clock", "graph"), scenario=scenario)
    assert done.returncode != ExitStatus.DONE
    assert re.search(kernel.refusal.said, done.stdout + done.stderr), done.stdout + done.stderr


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kernel", CONTROLS, ids=lambda kernel: kernel.__name__)
def test_an_honest_kernel_is_timed(kernel: Any) -> None:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(kernel).__name__).lower()
    done = compared(f"corpus/dishonest/honest.py:{name}")
    assert done.returncode in (ExitStatus.DONE, ExitStatus.WRONG), done.stdout + done.stderr  # WRONG: it is slower
    assert re.search("The second is (SAME|UNSURE|SLOWER|FASTER)", done.stdout)
