"""The fact file of trtllm-gen's kernels: what it says of some, and that it says all that its source does."""

import lzma
import os
from pathlib import Path

import pytest

from lab.dry_run import kernel_table
from lab.dry_run.kernel_table import KernelTable, header, newest, parsed, recorded


def test_the_fact_file_names_each_kernel_once() -> None:
    table = recorded()
    assert (table.source, len(table)) == ("flashinfer-cubin 0.6.13", 13_452)
    assert len({*table.columns["mFuncName"]}) == len(table)


def first_rows(source: str) -> KernelTable:
    table = recorded()
    return KernelTable(source, table.types, {name: values[:3] for name, values in table.columns.items()})


def test_a_header_has_what_a_launcher_reads() -> None:
    table = recorded()
    members = frozenset({"mTileSizeQ", "mFp16Softmax"})
    again = parsed(header(table, members), table.source)
    assert again.columns == table.columns | {"mFp16Softmax": ("false",) * len(table)}
    assert table.lacks(members) == ("mFp16Softmax",)
    assert again.lacks(members) == ()


def test_other_text_is_no_table() -> None:
    with pytest.raises(ValueError, match=r"nothing: no flashInferMetaInfo\.h with a struct"):
        parsed("int x;", "nothing")


def test_a_folder_of_flashinfers_binaries_is_used_where_it_has_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHINFER_CUBIN_DIR", raising=False)
    installed = newest()
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path))
    assert newest() == installed
    few = first_rows("few")
    (tmp_path / kernel_table.HEADER_NAME).write_text(header(few, frozenset({"mNew"})))
    used = newest()
    assert used.source == f"FLASHINFER_CUBIN_DIR={tmp_path}"
    assert used.columns == few.columns | {"mNew": ("false",) * 3}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / kernel_table.HEADER_NAME).write_text("")
    with pytest.raises(ValueError, match=r"wanted one flashInferMetaInfo\.h, found 2"):
        newest()


def test_the_fact_file_is_what_flashinfer_cubin_makes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = os.environ.get("LAB_FLASHINFER_CUBIN_WHEEL")
    if wheel is None:
        pytest.skip(
            "LAB_FLASHINFER_CUBIN_WHEEL names no wheel (pip download --no-deps flashinfer-cubin==0.6.13, 458 MB)"
        )
    kernel_table.main([wheel, "--out", str(tmp_path / "facts.xz")])
    assert "13452 kernels of flashinfer-cubin 0.6.13" in capsys.readouterr().out
    written = lzma.decompress((tmp_path / "facts.xz").read_bytes()).decode()
    assert written == header(recorded(), frozenset())
    source = parsed(kernel_table.header_text(Path(wheel)), recorded().source)
    assert source == recorded()
