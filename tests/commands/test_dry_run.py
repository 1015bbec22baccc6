"""`lab dry-run`: what passes come to on GPUs that are not here, by FlashInfer's launcher or by the rules."""

import json
import shlex
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from lab.commands.dry_run import dry_run
from lab.dry_run import GPUS, build, why_not_built
from lab.dry_run.passes import surveyed_passes
from lab.gpus import DATASHEETS
from lab.workloads import DEFAULT_SCENARIOS
from tests.commands.command import run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what FlashInfer imports
needs_launcher = pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built()))
DECODE = "decode/llama-3.1-8b/64q1s4k"
MULTI_CTA = "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64MultiCtasKvCgaVarSeqQ8Kv128StaticSwapsAbForGen"


def record(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    assert run(f"dry-run {line} --json -") == 0
    return json.loads(capsys.readouterr().out)


def calls_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["pass"]: call for each in found["passes"] for call in each["calls"]}


def test_the_command_has_every_gpu_and_each_has_a_datasheet() -> None:
    names = get_args(get_type_hints(dry_run)["gpu"])
    assert set(names) == set(GPUS), (
        "lab.commands.dry_run restates the names of lab.dry_run.machine.GPUS without an import"
    )
    assert {gpu.cuda_name for gpu in GPUS.values()} <= set(DATASHEETS)


def test_the_passes_are_those_of_lab_bench_and_every_mode_under_names_of_their_own() -> None:
    names = [name for name, _ in surveyed_passes()]
    assert tuple(names[: len(DEFAULT_SCENARIOS)]) == DEFAULT_SCENARIOS
    assert len(set(names)) == len(names)
    modes = {name.split("/")[2] for name in names if name.startswith("M1/")}
    drafts = {"target_verify", "ragged_verify", "draft_extend", "draft_extend_v2"}
    assert modes == {"decode", "extend", "mixed"} | drafts


def test_by_the_rules_a_kernel_is_named_or_its_refusal_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, f"--gpu h200 --only {DECODE},M2/16_heads/decode")
    assert found["by_rules_because"] == "FlashInfer's launcher is trtllm-gen's, which H200 does not run"
    calls = calls_of(found)
    assert calls[DECODE] | {"launches": []} == {
        "function": "trtllm_batch_decode_with_kv_cache",
        "kernel": "XQA",
        "launches": [],
        "refusal": None,
        "failure": None,
    }
    assert calls["M2/16_heads/decode"]["refusal"] == "XQA MLA needs a GPU of SM120 and SM121, this is SM90"
    decode = found["passes"][0]
    assert (decode["floor_us"], decode["floor_bound"]) == (
        pytest.approx(decode["bytes_moved"] / 4800e3, abs=1e-3),
        "memory",
    )


def test_a_gpu_without_trtllm_kernels_runs_the_portable_ones(capsys: pytest.CaptureFixture[str]) -> None:
    calls = calls_of(record(capsys, "--gpu a100 --only e4m3,M2/16_heads/decode,8q1s1k"))
    assert calls["decode/llama-3.1-8b/8q1s1k"]["kernel"] == "the portable Triton kernel"
    assert calls["M2/16_heads/decode"]["kernel"] == "the portable Triton MLA kernel"
    assert (
        calls[f"{DECODE}/e4m3/e4m3_products"]["refusal"] == "Triton compiles e4m3 for SM89 and later, and this is SM80"
    )


def test_without_a_launcher_the_rules_answer_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "why_not_built", lambda: "there is no nvcc")
    assert run(f"dry-run --gpu b200 --only {DECODE}") == 0
    said = capsys.readouterr().out
    assert "Kernels are by the rules of lab.kernels.support alone: there is no nvcc." in said
    assert "trtllm-gen decode" in said


def test_a_rate_that_no_datasheet_states_bounds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("dry-run --gpu spark --scenario extend/llama-3.1-8b/8q4k") == 0
    said = capsys.readouterr().out
    assert "Floor of a pass: bytes divided by 273 GB/s (NVIDIA DGX Spark" in said
    assert "memory" in said


@needs_launcher
def test_on_a_b200_flashinfers_launcher_names_kernel_grid_and_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = "M2/128_heads/target_verify,mixed/split_tail,8q1s1k"
    assert run(shlex.split(f"dry-run --gpu b200 --only {only} --json {tmp_path}/b200.json --markdown -")) == 0
    said = capsys.readouterr().out
    assert f"| decode/llama-3.1-8b/8q1s1k | {MULTI_CTA} | 2 x 8 x 8 | 2 | 33.69 | 4.21 | memory |" in said
    assert "from the kernel table of flashinfer-cubin" in said
    assert ", fmhaReductionKernel |" in said
    assert f"PersistentContext + {MULTI_CTA} | 1 x 32 x 3 + 6 x 8 x 3 | 1 + 6 |" in said
    found = json.loads((tmp_path / "b200.json").read_text())
    (launch,) = calls_of(found)["decode/llama-3.1-8b/8q1s1k"]["launches"]
    assert launch == {
        "name": MULTI_CTA,
        "grid": [2, 8, 8],
        "block": launch["block"],
        "cluster": 2,
        "pdl": True,
        "shared_memory_bytes": launch["shared_memory_bytes"],
    }


@needs_launcher
def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("dry-run --gpu b200 --markdown -") == 0
    _, table, remarks = capsys.readouterr().out.strip().split("\n\n")
    page = (Path(__file__).parents[2] / "docs" / "evidence" / "blackwell.md").read_text()
    if " ".join(remarks.split()) not in " ".join(page.split()):
        pytest.skip("the page is of other versions of FlashInfer or of its table")
    assert table in page, "write the output of lab dry-run --gpu b200 --markdown - into docs/evidence/blackwell.md"


@needs_launcher
def test_a_kernel_that_an_older_table_lacks_is_not_called_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, f"--gpu b200 --only {DECODE}/e4m3")
    if not found["kernel_table_is_older"]:
        pytest.skip(f"the table of {found['kernel_table']} is as new as the launcher")
    (call,) = calls_of(found).values()
    assert call["refusal"] is None
    assert "Missing TRTLLM-GEN kernel (decode)" in call["failure"]
    assert run(f"dry-run --gpu b200 --only {DECODE}/e4m3") == 0
    assert (
        f"no kernel in the table of {found['kernel_table']}, which is older than the launcher"
        in capsys.readouterr().out
    )


@needs_launcher
@pytest.mark.parametrize(
    ("kernels", "status", "said"),
    [
        ([MULTI_CTA, "void at::native::elementwise_kernel<4>(int)"], 0, "1 of 1 pass ran the kernels of the dry run."),
        (["fmhaSm100fKernel_Another"], 1, "0 of 1 pass ran the kernels of the dry run."),
    ],
)
def test_a_run_on_the_gpu_is_held_against_the_dry_run(
    kernels: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"scenario": "decode/llama-3.1-8b/8q1s1k", "implementation": "lab.kernels.trtllm", "kernels": kernels}
    write_run(tmp_path / "run.json", facts | {"clock": "cupti"})
    assert run(f"dry-run --gpu b200 --only 8q1s1k,64q4s4k --recorded {tmp_path}/run.json") == status
    assert said in capsys.readouterr().out


def test_a_run_without_kernels_names_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run.json", {"scenario": DECODE, "implementation": "lab.kernels.trtllm", "clock": "graph"})
    assert run(f"dry-run --gpu b200 --recorded {tmp_path}/run.json") == 2
    assert "record them with lab bench --lab-clock cupti" in capsys.readouterr().err


def test_by_the_rules_alone_no_run_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"scenario": DECODE, "implementation": "lab.kernels.trtllm", "kernels": ["kernel_mha"], "clock": "cupti"}
    write_run(tmp_path / "run.json", facts)
    assert run(f"dry-run --gpu h200 --only {DECODE} --recorded {tmp_path}/run.json") == 125
    assert "not compared: no launcher names the kernels" in capsys.readouterr().err


def write_run(path: Path, facts: dict[str, Any]) -> None:
    benchmark = {"fullname": "test_timed", "stats": {"data": [1e-5, 1e-5]}, "extra_info": facts}
    path.write_text(json.dumps({"benchmarks": [benchmark], "machine_info": {}}))
