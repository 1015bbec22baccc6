"""The plugin in another repository's pytest: what is wrong fails, what is right passes, and what refuses everything fails."""

import importlib
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab.checks import Ranges
from lab.checks.properties import checks
from lab.ranges import options_of
from tests.checks.small import SMALL

ROOT = Path(__file__).parent.parent
# A kernel for bf16, head_dim 128 and pages of 64, as it is given in somebody's repository; right, wrong, and none at all.
KERNELS = """
import torch
from types import SimpleNamespace
from lab.references import trtllm_batch_decode_with_kv_cache as reference

def narrow(factor, refuses=False):
    def decode(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0):
        k, v = kv_cache
        if refuses or k.dtype != torch.bfloat16 or query.shape[-1] != 128 or k.shape[2] != 64:
            raise ValueError("only bf16, head_dim 128 and pages of 64 tokens")
        return reference(query, (k, v), None, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale) * factor
    return SimpleNamespace(trtllm_batch_decode_with_kv_cache=decode)

right, wrong, refusing = narrow(1), narrow(1.1), narrow(1, refuses=True)

def crash(seq_lens, **arguments):  # with two requests, as in K12
    import ctypes
    if len(seq_lens) == 2:
        ctypes.string_at(0)
    return reference(seq_lens=seq_lens, **arguments)

crashing = SimpleNamespace(trtllm_batch_decode_with_kv_cache=crash)
"""
NARROW = options_of(replace(SMALL, head_dims=(128,), page_sizes=(64,), q_lens=(1,), longest=70), "--lab-")

# The axes that the kernels do not limit, narrow for the test's time alone.
NARROW_BUT_TAKEN = "--lab-dtypes bf16/bf16 --lab-groups 2 --lab-num-kv-heads 1 --lab-q-lens 1 --lab-longest 70"


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import what each run of pytest here would import, and forget at its end."""
    for name in ("hypothesis.strategies", "lab.reports.judgement", "lab.timing.staging", "pebble.pool.process"):
        importlib.import_module(name)
    checks()


@pytest.fixture
def elsewhere(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    pytester.makepyfile(kernels=KERNELS, test_own="def test_own(): pass")
    return pytester


def run(elsewhere: pytest.Pytester, line: str) -> pytest.RunResult:
    return elsewhere.runpytest_inprocess("-p", "lab.pytest_plugin", "-p", "no:cacheprovider", "-rs", *shlex.split(line))


def test_a_right_narrow_kernel_passes_and_what_it_declines_is_skipped(elsewhere: pytest.Pytester) -> None:
    done = run(elsewhere, f"--lab-judge kernels.py:right {NARROW} -k 'K1- or K4- or K8-'")
    done.assert_outcomes(passed=2, skipped=1, deselected=len(checks_of_decode()) - 3)
    done.stdout.fnmatch_lines(["collected * deselected / 3 selected", "SKIPPED*q_len_per_req*"])


def checks_of_decode() -> list[str]:
    return [check.key for check in checks() if "DECODE" in {interface.name for interface in check.interfaces}]


def test_a_broken_narrow_kernel_fails_with_its_worst_case(elsewhere: pytest.Pytester) -> None:
    done = run(elsewhere, f"--lab-judge kernels:wrong {NARROW} -k K1-")
    done.assert_outcomes(failed=1, deselected=len(checks_of_decode()) - 1)
    done.stdout.fnmatch_lines(
        [
            "Wrong in *",
            "The output is wrong everywhere *",
            "*row * (request *), head *, elements *: expected * got *",
            "*reproduce with: lab judge --case */cache/lab/kernels-wrong-*-K1-trtllm_batch_decode_with_kv_cache.json#*",
        ]
    )
    assert "Traceback" not in done.stdout.str()


def test_a_kernel_that_crashes_fails_and_does_not_end_pytest(elsewhere: pytest.Pytester) -> None:
    done = run(elsewhere, f"--lab-judge kernels.py:crashing {NARROW} test_own.py -k 'own or K12-'")
    done.assert_outcomes(failed=1, passed=1, deselected=len(checks_of_decode()) - 1)
    done.stdout.fnmatch_lines(["*it crashed its process (killed by signal 11, SIGSEGV)*"])


def test_the_fixture_shows_the_tests_line_and_no_source_of_the_lab(elsewhere: pytest.Pytester) -> None:
    elsewhere.makepyfile(
        test_fixture="""
        import torch

        def test_it(assert_close_to_reference):
            query, cache = torch.ones(1, 4, 64), torch.ones(2, 2, 16, 64)
            lengths, table = torch.tensor([9], dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
            given = {"block_tables": table, "seq_lens": lengths, "max_seq_len": 9}
            assert_close_to_reference(2 * query, query=query, kv_cache=(cache, cache), **given)
        """
    )
    shown = run(elsewhere, "test_fixture.py").outlines
    start = next(place for place, line in enumerate(shown) if "FAILURES" in line)
    told = next(place for place, line in enumerate(shown) if "vectors are wrong" in line)
    assert told - start <= 10


@pytest.mark.parametrize(("kernel", "outcome"), [("right", "passed"), ("wrong", "failed")])
def test_a_narrow_kernel_is_judged_on_what_it_takes(elsewhere: pytest.Pytester, kernel: str, outcome: str) -> None:
    done = run(elsewhere, f"--lab-judge kernels.py:{kernel} {NARROW_BUT_TAKEN} -k K4-")
    done.assert_outcomes(**{outcome: 1}, deselected=len(checks_of_decode()) - 1)
    taken = "--lab-head-dims 128 --lab-page-sizes 64"
    done.stdout.fnmatch_lines([f"kernels.py:{kernel}: *decode* was judged on what it takes: *{taken}*"])


def test_a_kernel_that_refuses_everything_fails(elsewhere: pytest.Pytester) -> None:
    done = run(elsewhere, f"--lab-judge kernels.py:refusing {NARROW} -k K1-")
    done.assert_outcomes(failed=1, deselected=len(checks_of_decode()) - 1)
    done.stdout.fnmatch_lines(["nothing of trtllm_batch_decode_with_kv_cache could be judged*only bf16, head_dim 128*"])


def test_what_is_a_refusal_can_be_said(elsewhere: pytest.Pytester) -> None:
    done = run(elsewhere, f"--lab-judge kernels.py:refusing {NARROW} -k K1- --lab-refusals NotImplementedError")
    done.assert_outcomes(failed=1, deselected=len(checks_of_decode()) - 1)
    done.stdout.fnmatch_lines(["*smallest case: K1 of decode*", "*ValueError: only bf16*"])
    assert "K1 of trtllm_batch_decode_with_kv_cache is failed" not in done.stdout.str()


def test_the_judge_s_tests_are_alone_unless_a_path_is_named(elsewhere: pytest.Pytester) -> None:
    alone = run(elsewhere, "--lab-judge kernels.py:right --collect-only -q")
    assert [line for line in alone.outlines if "::" in line] == [
        f"kernels.py:right::{check.key}-{check.name}[decode]" for check in checks() if check.key in checks_of_decode()
    ]
    beside = run(elsewhere, f"--lab-judge kernels.py:right {NARROW} test_own.py -k 'own or K5-'")
    beside.assert_outcomes(passed=2, deselected=len(checks_of_decode()) - 1)
    run(elsewhere, "-q").assert_outcomes(passed=1)


def test_another_plugin_s_option_is_no_axis(elsewhere: pytest.Pytester) -> None:
    elsewhere.makeconftest("def pytest_addoption(parser): parser.addoption('--groups', type=int, default=1)")
    done = run(elsewhere, "--rootdir . --confcutdir . --lab-judge kernels.py:right --groups 3 --collect-only -q")
    assert done.ret == pytest.ExitCode.OK


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--lab-judge nowhere", "--lab-judge: nowhere cannot be imported: No module named 'nowhere'"),
        ("--lab-judge json", "--lab-judge: json has none of trtllm_batch_decode_with_kv_cache"),
        ("--lab-judge kernels:right --lab-head-dims 64,x", "argument --lab-head-dims: x is not a whole number"),
        ("--lab-judge kernels:right --lab-profile trt", "argument --lab-profile: no profile is called 'trt'"),
        ("--lab-judge kernels:right --lab-refusals Refused", "--lab-judge: 'Refused' is no exception"),
    ],
)
def test_a_mistake_is_a_sentence(elsewhere: pytest.Pytester, line: str, says: str) -> None:
    done = run(elsewhere, line)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert says in done.stderr.str()
    assert "Traceback" not in done.stderr.str()


def test_every_axis_is_an_option(elsewhere: pytest.Pytester) -> None:
    said = run(elsewhere, "--help").stdout.str()
    switched_off = {"windows", "sinks", "nvfp4"}
    for name in Ranges.__dataclass_fields__:
        assert f"--lab-{'no-' if name in switched_off else ''}{name.replace('_', '-')}" in said


def test_the_plugin_costs_a_pytest_without_it_nothing() -> None:
    program = "import lab.pytest_plugin, sys; print([name for name in ('torch', 'rich', 'lab.checks') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
