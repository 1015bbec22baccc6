"""The site is built without a warning, has a page for everything, and asks nothing of the network."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("furo", "myst_nb", "sphinx"):
    pytest.importorskip(module, reason=f"{module} builds the site: the extra docs brings it")

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
PACKAGES = ("references", "kernels", "metadata", "workloads", "checks", "timing", "experiments", "plots")
# What a browser fetches by itself: scripts, styles, pictures and frames, but no link that a reader may follow.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)[^>]*\ssrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link[^>]*rel=[\"']?(?:stylesheet|preload|preconnect|icon|shortcut icon)[^>]*href=[\"']?((?:https?:)?//[^\"'\s>]+)"
)
FETCHED_BY_STYLE = re.compile(r"(?:@import\s+|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds."""
    folder = tmp_path_factory.mktemp("site")
    build = ["-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-c", "docs", "-d", folder / "doctrees"]
    command = [sys.executable, *build, ".", folder / "html"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder / "html"


def test_it_begins_at_its_index(site: Path) -> None:
    (target,) = re.findall(r'href="([^"]+)"', (site / "index.html").read_text(encoding="utf-8"))
    assert (site / target).is_file()


def test_every_page_and_notebook_is_there(site: Path) -> None:
    sources = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "notebooks").glob("*.ipynb"),
    ]
    sources += [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    sources += [ROOT / "results" / "nvidia-h200" / "findings.md"]
    absent = [str(path) for path in sources if not (site / path.relative_to(ROOT).with_suffix(".html")).is_file()]
    assert not absent


def test_notebooks_show_their_committed_pictures(site: Path) -> None:
    page = (site / "notebooks" / "1_forward_modes.html").read_text(encoding="utf-8")
    pictures = re.findall(r'<img[^>]*src="\.\./(_images/[^"]+)"', page)
    assert pictures
    assert all((site / picture).is_file() for picture in pictures)


def test_docstrings_are_there(site: Path) -> None:
    page = (site / "docs" / "api" / "references.html").read_text(encoding="utf-8")
    assert 'id="lab.references.trtllm_batch_decode_with_kv_cache"' in page
    assert "Softmax" in page or "softmax" in page


def test_it_asks_nothing_of_the_network(site: Path) -> None:
    fetched = [
        f"{path.relative_to(site)}: {found}"
        for pattern, suffix in ((FETCHED, ".html"), (FETCHED_BY_STYLE, ".css"), (FETCHED_BY_STYLE, ".html"))
        for path in site.rglob(f"*{suffix}")
        for found in pattern.findall(path.read_text(encoding="utf-8"))
    ]
    assert not fetched


@pytest.mark.parametrize(
    "page",
    [
        '<script async src="https://cdn.example/x.js"></script>',
        '<img alt="a" src=//cdn.example/x.png>',
        '<link rel="stylesheet" href="https://fonts.example/css">',
    ],
)
def test_a_request_is_seen(page: str) -> None:
    assert FETCHED.search(page)


def test_a_link_is_no_request() -> None:
    assert not FETCHED.search('<a href="https://example.org/">there</a><script src="_static/x.js"></script>')
    assert FETCHED_BY_STYLE.search('@import "https://fonts.example/css";')


def documented() -> set[str]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in API.glob("*.md"))
    return set(re.findall(r"automodule:: (\S+)", text))


def test_what_is_documented_can_be_imported() -> None:
    assert not [module for module in documented() if importlib.util.find_spec(module) is None]


def test_every_package_has_a_page() -> None:
    assert {f"lab.{package}" for package in PACKAGES} <= documented()
