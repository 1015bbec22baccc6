"""Files are written in one step."""

import os
from pathlib import Path

import pytest

from lab.files import read_json, without_suffix, write_text


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "report.json"
    write_text(path, "größer\n")
    assert path.read_text(encoding="utf-8") == "größer\n"
    assert [each.name for each in path.parent.iterdir()] == ["report.json"]


def test_what_fails_leaves_the_old_text_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    write_text(path, "old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_mode_is_a_written_files_own(tmp_path: Path) -> None:
    path, plain = tmp_path / "report.json", tmp_path / "plain"
    plain.write_text("")
    write_text(path, "old")
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o600)
    write_text(path, "new")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_what_is_no_file_is_written_to() -> None:
    write_text(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("name", ["report.json", "report.json.gz"])
def test_json_is_read_compressed_or_not(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write_text(path, '{"größe": [1]}')
    assert read_json(path) == {"größe": [1]}
    assert without_suffix(path) == tmp_path / "report"
    first = path.read_bytes()
    assert (first[:2] == b"\x1f\x8b") == name.endswith(".gz")
    write_text(path, '{"größe": [1]}')
    assert path.read_bytes() == first


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "report.json.gz"
    write_text(path, '{"cases": []}')
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged"):
        read_json(path)
    path.write_text('{"cases": []}')
    with pytest.raises(OSError, match="gzipped"):
        read_json(path)
