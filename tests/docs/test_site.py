"""The site is built without a warning, has a page for everything, and asks nothing of the network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
PACKAGES = ("references", "kernels", "metadata", "workloads", "checks", "timing", "dry_run", "reports")
# What a browser fetches by itself: scripts, styles, pictures and frames, but no link that a reader may follow.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)[^>]*\ssrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link[^>]*rel=[\"']?(?:stylesheet|preload|preconnect|icon|shortcut icon)[^>]*href=[\"']?((?:https?:)?//[^\"'\s>]+)"
)
FETCHED_BY_STYLE = re.compile(r"(?:@import\s+|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)")


def test_the_site(tmp_path: Path) -> None:
    """One test: the build takes half a minute, and each of the processes that share the tests would make its own."""
    for module in ("furo", "myst_nb", "sphinx"):
        pytest.importorskip(module, reason=f"{module} builds the site: the extra docs brings it")
    site = tmp_path / "html"
    build(site, tmp_path / "doctrees")
    (target,) = re.findall(r'href="([^"]+)"', (site / "index.html").read_text(encoding="utf-8"))
    assert (site / target).is_file()
    assert not absent_pages(site)
    pictures = re.findall(r'<img[^>]*src="\.\./(_images/[^"]+)"', read(site / "notebooks" / "1_forward_modes.html"))
    assert pictures
    assert all((site / picture).is_file() for picture in pictures)
    assert 'id="lab.references.trtllm_batch_decode_with_kv_cache"' in read(site / "docs" / "api" / "references.html")
    assert not requests_of(site)
    assert "max_q_len,\u200bmax_kv_len --" in re.sub(r"<[^>]*>", "", read(site / "docs" / "api" / "calls.html"))
    index = read(site / "docs" / "index.html")
    style = re.search(r'href="\.\./(_static/site\.css)[^"]*"', index)
    assert style
    assert (site / style[1]).is_file()
    entries = re.findall(r'class="toctree-l1[^"]*"><a class="reference internal" href="([^"]+)"', index)
    assert {"install.html", "evidence/records.html"} <= set(entries)
    # The pages of recorded results would be half of the side bar, so they are below one entry.
    assert sum(entry.startswith("../results/") for entry in entries) < 10


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def build(site: Path, doctrees: Path) -> None:
    """What `make docs` does."""
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-c", "docs", "-d", str(doctrees)]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(site)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]


def absent_pages(site: Path) -> list[Path]:
    """Sources that the site has no page of."""
    sources = [
        ROOT / name
        for name in (
            *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
            *(f"results/{folder}/findings.md" for folder in ("nvidia-h200", "flashinfer", "sglang")),
        )
    ]
    sources += (ROOT / "notebooks").glob("*.ipynb")
    sources += (path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
    return [path for path in sources if not (site / path.relative_to(ROOT).with_suffix(".html")).is_file()]


def requests_of(site: Path) -> list[str]:
    """What a browser that shows a page of the site would ask of another host."""
    return [
        f"{path.relative_to(site)}: {found}"
        for pattern, suffix in ((FETCHED, ".html"), (FETCHED_BY_STYLE, ".css"), (FETCHED_BY_STYLE, ".html"))
        for path in site.rglob(f"*{suffix}")
        for found in pattern.findall(read(path))
    ]


REQUESTS = {
    "script.html": '<script async src="https://cdn.example/x.js"></script>',
    "picture.html": '<img alt="a" src=//cdn.example/x.png>',
    "link.html": '<link rel="stylesheet" href="https://fonts.example/css">',
    "style.html": '<style>@import "https://fonts.example/css";</style>',
    "style.css": "body { background: url(https://cdn.example/x.png) }",
}


def test_a_request_is_seen_and_a_link_is_none(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text('<a href="https://example.org/">there</a><script src="_static/x.js"></script>')
    for name, text in REQUESTS.items():
        (tmp_path / name).write_text(text)
    assert sorted(found.partition(":")[0] for found in requests_of(tmp_path)) == sorted(REQUESTS)


def documented() -> set[str]:
    """The modules on the API's pages."""
    return {name for page in API.glob("*.md") for name in re.findall(r"automodule:: (\S+)", read(page))}


def test_every_package_has_a_page() -> None:
    assert {"studies", *(f"lab.{package}" for package in PACKAGES)} <= documented()


@pytest.mark.parametrize("folder", ["lab/reports/pictures", "studies/pictures"])
def test_every_module_of_pictures_is_on_a_page(folder: str) -> None:
    modules = {f"{folder.replace('/', '.')}.{path.stem}" for path in (ROOT / folder).glob("[!_]*.py")}
    assert modules
    assert modules <= documented()
