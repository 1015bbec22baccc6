"""A report's file: cases read back without evaluating anything, runs that take up an older one, single cases judged again."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import checks as everything
from lab.checks import Level, Outcome, Ranges, Report, judge
from lab.checks.properties import checks
from lab.checks.record import ReportError, read_case, read_expression, read_record
from lab.checks.run.judge import judge_recorded
from lab.checks.run.judge_run import Progress
from lab.checks.run.workers import Workers
from lab.loading import LoadError
from lab.reports.judgement import reproduction
from tests.checks.small import SMALL

KERNEL = """
from lab.references import trtllm_batch_decode_with_kv_cache as right

def trtllm_batch_decode_with_kv_cache(**arguments):
    if int(arguments["seq_lens"].max()) > {longest}:
        arguments["bmm2_scale"] = 2.0
    return right(**arguments)
"""


@pytest.mark.parametrize("ranges", [Ranges(), SMALL])
def test_every_case_and_the_axes_are_read_back(ranges: Ranges) -> None:
    """By the lab, and by Python: a reproduction is a line that is pasted into a shell."""
    names = {"torch": torch} | {name: getattr(everything, name) for name in everything.__all__}
    assert read_expression(repr(ranges)) == ranges
    for check in checks():
        for interface in check.interfaces:
            for case in check.cases(interface, ranges, Level.SMOKE):
                assert read_expression(repr(case)) == case
                assert ranges is not SMALL or eval(repr(case), dict(names)) == case


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """A decode that is wrong beyond 30 keys."""
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL.format(longest=30))
    return path


@pytest.fixture
def judged_cases(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The cases that are judged, and not recalled."""
    cases: list[Any] = []
    submit = Workers.submit

    def counted(self: Workers, check: str, case: Any, *where: Any) -> Any:
        cases.append(case)
        return submit(self, check, case, *where)

    monkeypatch.setattr(Workers, "submit", counted)
    return cases


def judged(kernel: Path, **how: Any) -> Report:
    """Judge by K5, without random cases."""
    usual = {"only": ["K5"], "ranges": SMALL, "device": "cpu", "drawn": 0, "out": kernel.parent / "new" / "r.json"}
    return judge(str(kernel), **usual | how)


def test_a_second_run_judges_again_what_was_wrong_alone(kernel: Path, judged_cases: list[Any]) -> None:
    first = judged(kernel, drawn=2)
    all_cases = len(judged_cases)
    wrong = {verdict.number: verdict.case for verdict in first.wrong}
    assert 0 < len(wrong) < len(first.verdicts)
    judged_cases.clear()
    second = judged(kernel, drawn=2)
    assert {verdict.number: verdict.case for verdict in second.wrong} == wrong
    assert [each.case for each in second.verdicts] == [each.case for each in first.verdicts]
    assert sorted(each.number for each in second.verdicts) == list(range(1, len(first.verdicts) + 1))
    assert len(judged_cases) < all_cases
    again = {repr(case) for case in judged_cases}
    assert {repr(each.case) for each in first.wrong if not each.drawn} <= again
    assert not again & {repr(each.case) for each in first.verdicts if each.outcome is Outcome.RIGHT and not each.drawn}
    assert first.ended == "the time was over"  # no fault is to end it


@pytest.mark.parametrize("change", [{"source": 99}, {"fresh": True}, {"discover": False}, {"seed": 4}])
def test_what_has_changed_is_judged_anew(kernel: Path, judged_cases: list[Any], change: dict[str, Any]) -> None:
    judged(kernel)
    all_cases = len(judged_cases)
    judged_cases.clear()
    kernel.write_text(KERNEL.format(longest=change.pop("source", 30)))
    judged(kernel, **change)
    assert len(judged_cases) == all_cases
    assert read_record(kernel.parent / "new" / "r.json")["seed"] == change.get("seed", 0)


def test_what_a_kernel_imports_later_or_reads_of_the_environment_is_judged_anew(
    kernel: Path, judged_cases: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = kernel.parent / "its_package" / "later.py"
    later.parent.mkdir()
    later.write_text("SCALE = 1.0\n")
    source = kernel.read_text().replace("    return", "    from its_package.later import SCALE\n    return")
    kernel.write_text(f"import os\nVALUE = os.environ.get('ITS_OWN_VALUE')\n{source}")

    def judged_anew() -> bool:
        judged_cases.clear()
        report = judged(kernel)
        return len(judged_cases) == len(report.verdicts)

    assert judged_anew()
    assert not judged_anew()
    later.write_text("SCALE = 2.0\n")
    assert judged_anew()
    monkeypatch.setenv("ITS_OWN_VALUE", "7")
    assert judged_anew()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert judged_anew()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not judged_anew()
    monkeypatch.setenv("_".join(("NOBODY", "S", "VALUE")), "7")  # this file is a loaded module too, and would name it
    assert not judged_anew()


def test_a_run_without_a_file_has_no_digest(kernel: Path) -> None:
    assert judged(kernel).run
    assert judged(kernel, out=None).run == ""


FORGES_THE_DIGEST = """
from lab.checks.run import sources

own = sources._digest

def forged(name):
    sources._digest = own
    return "forged"

sources._digest = forged
"""


def test_a_kernel_that_forges_the_digest_of_its_sources_is_judged_anew(kernel: Path, judged_cases: list[Any]) -> None:
    kernel.write_text(FORGES_THE_DIGEST + KERNEL.format(longest=99))
    assert judged(kernel, isolated=True).is_right
    judged_cases.clear()
    assert judged(kernel, isolated=True).is_right
    assert len(judged_cases) < 20  # the audit alone
    kernel.write_text(FORGES_THE_DIGEST + KERNEL.format(longest=0))
    outcomes = {each.outcome for each in judged(kernel, isolated=True).verdicts}
    # In a process that repeats one case, no digest is made: the forged function is still there, and found.
    assert Outcome.WRONG in outcomes <= {Outcome.WRONG, Outcome.DISHONEST}


def test_packages_on_another_path_are_not_the_kernels_sources(
    kernel: Path, judged_cases: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a torch that a `.pth` file puts on the path: a folder with a distribution's metadata holds installed packages."""
    folder = kernel.parent / "elsewhere"
    (folder / "some_package-1.0.dist-info").mkdir(parents=True)
    package = folder / "some_package.py"
    package.write_text("number = 1\n")
    monkeypatch.syspath_prepend(folder)
    kernel.write_text(f"import some_package\n{kernel.read_text()}")
    judged(kernel)
    before = len(judged_cases)
    package.write_text("number = 2\n")
    judged(kernel)
    again = len(judged_cases) - before
    (folder / "some_package-1.0.dist-info").rmdir()
    judged(kernel)
    assert len(judged_cases) - before - again > again
    del sys.modules["some_package"]


def test_an_interrupted_run_keeps_its_verdicts_and_is_taken_up(kernel: Path, judged_cases: list[Any]) -> None:
    told: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        told.append(progress)
        if progress.done == 4:
            raise KeyboardInterrupt

    report = judged(kernel, progress=interrupt)
    record = json.loads((kernel.parent / "new" / "r.json").read_text())
    assert (report.interrupted, report.exit_status, len(report.verdicts)) == (True, 130, 3)
    assert (record["interrupted"], len(record["cases"])) == (True, 3)
    assert report.left_out == told[-1].total - 4
    before = len(judged_cases)
    whole = judged(kernel)
    assert not whole.interrupted
    numbers = {(each.check, repr(each.case)): each.number for each in whole.verdicts}
    assert all(numbers[each.check, repr(each.case)] == each.number for each in report.verdicts)
    assert sorted(numbers.values()) == list(range(1, len(whole.verdicts) + 1))
    assert len(judged_cases) - before <= told[-1].total - sum(each.outcome is Outcome.RIGHT for each in report.verdicts)


def test_the_first_failure_ends_the_run(kernel: Path) -> None:
    report = judged(kernel, first_failure=True)
    assert len(list(report.wrong)) == 1 or report.verdicts[-1].outcome is Outcome.WRONG
    assert report.left_out > 0
    assert report.ended == "the first wrong case ended the run"
    assert report.exit_status == 1


def test_a_recorded_case_is_judged_again_by_its_number(kernel: Path) -> None:
    report = judged(kernel)
    wrong = next(report.wrong)
    path = Path(wrong.recorded_in)
    assert reproduction(wrong) == f"lab judge --case {path}#{wrong.number}"
    assert read_case(path, wrong.number).case == wrong.case
    again = judge_recorded(path, wrong.number, isolated=True)
    assert (again.outcome, again.exit_status) == (Outcome.WRONG, 1)
    right = next(each for each in report.verdicts if each.outcome is Outcome.RIGHT)
    assert judge_recorded(path, right.number, isolated=False).exit_status == 0
    with pytest.raises(ReportError, match="has no case 999: it has"):
        judge_recorded(path, 999)
    kernel.write_text("def trtllm_batch_decode_with_kv_cache(**arguments):\n    while True:\n        pass\n")
    hangs = judge_recorded(path, wrong.number, time_limit_s=3.0)
    assert hangs.reason.startswith("it did not return within 3 s; it was in trtllm_batch_decode_with_kv_cache (")
    assert hangs.exit_status == 1
    kernel.write_text("import nowhere\n")
    with pytest.raises(LoadError, match=r"No module named 'nowhere' \(kernel.py, line 1\)"):
        judge_recorded(path, wrong.number)


def test_a_recorded_case_is_refused_as_its_run_was(kernel: Path) -> None:
    kernel.write_text("def trtllm_batch_decode_with_kv_cache(**arguments):\n    raise LookupError('not today')\n")
    report = judged(kernel, refusals=(LookupError,))
    path = Path(report.verdicts[0].recorded_in)
    assert report.exit_status == judge_recorded(path, 1, isolated=False).exit_status == 125


def test_a_module_that_a_report_names_is_imported_only_from_the_kernels_package(
    kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = judged(kernel)
    path = Path(report.verdicts[0].recorded_in)
    monkeypatch.syspath_prepend(kernel.parent)
    (kernel.parent / "evil_module.py").write_text("class Refused(Exception):\n    pass\n")
    path.write_text(path.read_text().replace('"refusals": []', '"refusals": ["evil_module.Refused"]'))
    for name in (None, "tests.checks.hostile"):
        with pytest.raises(
            ReportError, match=r"counts evil_module.Refused as a refusal, which is not in the kernel's pack"
        ):
            judge_recorded(path, 1, implementation=name, isolated=False)
    assert "evil_module" not in sys.modules
    assert judge_recorded(path, 1, isolated=False, refusals=(KeyError,)).number == 1
    path.write_text(path.read_text().replace("evil_module.Refused", "tests.checks.hostile.Odd"))
    assert judge_recorded(path, 1, implementation="tests.checks.someone_elses", isolated=False).number == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"cases": 5}', '{"cases": [5]}', '{"cases": [{}], "ranges": "Ranges()"}']
)
def test_what_is_no_report_is_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ReportError, match="report"):
        read_case(path, 1)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The contents of a report."""
    path = tmp_path_factory.mktemp("kernel") / "kernel.py"
    path.write_text(KERNEL.format(longest=30))
    report = judged(path)
    found: dict[str, Any] = json.loads(Path(report.verdicts[0].recorded_in).read_text())
    return found


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"implementation": ["my.kernel"]}, "is no report of the judge: its implementation has the name"),
        ({"implementation": "my\0kernel.py"}, "is no report of the judge: its implementation has the name"),
        ({"cases": [{"check": "K99"}]}, "is of a check 'K99', which this lab does not have"),
    ],
)
def test_a_report_that_names_nothing_of_this_lab_is_a_sentence(
    record: dict[str, Any], tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "report.json"
    cases = [case | changed for case, changed in zip(record["cases"], changes.get("cases", [{}]), strict=False)]
    path.write_text(json.dumps(record | changes | {"cases": cases}))
    with pytest.raises(ReportError, match=sentence):
        read_case(path, 1)
