"""The site builds without a warning, its links lead somewhere, and nothing is fetched for it."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.support.chromium import PROGRAM, chromium

ROOT = Path(__file__).parents[2]
FETCHED = {"script", "link", "img", "iframe", "source"}
"""elements whose address is loaded with the page"""
PHONE = 390
"""pixels that a phone is wide"""


class PageReader(HTMLParser):
    """The addresses and the anchors of a page, and its text outside of code."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.num_formulas = 0
        self.prose = ""
        self._inside_code = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        self.num_formulas += tag == "math"
        self._inside_code += tag in ("code", "script", "style")
        address = values.get("href") or values.get("src")
        if address and tag in FETCHED and values.get("rel") != "canonical":
            self.fetched.append(address)
        elif address:
            self.links.append(address)

    def handle_endtag(self, tag: str) -> None:
        self._inside_code -= tag in ("code", "script", "style")

    def handle_data(self, data: str) -> None:
        self.prose += "" if self._inside_code else data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, PageReader]:
    # 404.html has absolute links, as its address is any
    files = sorted(file for file in site.rglob("*.html") if file.name != "404.html")
    return {file: PageReader(file.read_text(encoding="utf-8")) for file in files}


def test_every_page_of_the_docs_is_there(site: Path, pages: dict[Path, PageReader]) -> None:
    for file in (ROOT / "docs").rglob("*.md"):
        page = site / file.relative_to(ROOT / "docs").with_suffix(".html")
        assert (page.with_name("index.html") if file.stem == "README" else page) in pages
    for name in ("index", "quickstart", "changelog", "contributing", "security"):
        assert site / f"{name}.html" in pages


def test_links_lead_to_pages_and_their_headings(site: Path, pages: dict[Path, PageReader]) -> None:
    num_links = 0
    for file, page in pages.items():
        for address in (*page.links, *page.fetched):
            parts = urlsplit(address)
            if parts.scheme:
                continue
            where = f"{file.relative_to(site)} links to {address}"
            linked = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert linked.is_file(), where
            if parts.fragment and linked in pages:
                assert unquote(parts.fragment) in pages[linked].ids, where
            num_links += 1
    assert num_links > 1000


def test_links_to_source_files_show_them(site: Path, pages: dict[Path, PageReader]) -> None:
    p3o = site / "source/src/trustbatch/objectives/p3o.py.html"
    assert (
        "../source/src/trustbatch/objectives/p3o.py.html"
        in pages[site / "objectives" / "p3o.html"].links
    )
    assert "An ESS over the whole step must be known" in p3o.read_text()
    listing = pages[site / "source/src/trustbatch/tasks.html"]
    assert "tasks/arithmetic.py.html" in listing.links


def test_nothing_is_fetched_from_another_host(site: Path, pages: dict[Path, PageReader]) -> None:
    for file, page in pages.items():
        for address in page.fetched:
            assert urlsplit(address).scheme in ("", "data"), f"{file} fetches {address}"
    for file in site.rglob("*.css"):
        outside = re.findall(r"url\([\"']?(?:https?:)?//[^)]*\)|@import[^;]*//", file.read_text())
        assert not outside, file


def test_formulas_are_mathml(site: Path, pages: dict[Path, PageReader]) -> None:
    formula = pages[site / "objectives" / "p3o.html"]
    assert formula.num_formulas > 50
    for file, page in pages.items():
        left = re.search(r"\$\$|\\(?:frac|sum|pi|log|mathrm)\b|\\[(\[]", page.prose)
        assert left is None, f"{file} shows {left and left[0]}"


def test_braces_in_a_table_are_text(site: Path, pages: dict[Path, PageReader]) -> None:
    """Not attributes of the cell, as an extension of Markdown would read them."""
    assert "{fresh, lag 2," in pages[site / "studies.html"].prose


def test_the_reference_has_the_docstrings(site: Path, pages: dict[Path, PageReader]) -> None:
    page = pages[site / "api.html"]
    assert (
        "Train a model and return what came out; docs/python-api.md shows all of it." in page.prose
    )
    for name in (
        "api.train",
        "api.RunResult.checkpoint",
        "objectives.base.Objective.policy_loss",
        "objectives.base.Totals.per_token",
        "objectives.token_batch.TokenBatch.behavior_logp",
        "objectives.p3o.P3O.kl",
        "tasks.base.Task.grade",
        "rewards.terms.Term",
        "types.Completion.behavior_logp",
        "errors.ConfigError",
    ):
        assert f"trustbatch.{name}" in page.ids


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_in_a_browser_search_works_and_no_page_is_wider_than_a_phone(
    site: Path, tmp_path: Path
) -> None:
    with chromium(tmp_path) as page:
        for name in ("index", "quickstart", "configuration", "objectives/p3o", "results", "api"):
            page.load(site / f"{name}.html", width=PHONE)
            assert page.evaluate("document.documentElement.scrollWidth") == PHONE, name
        page.load(site / "index.html")
        page.evaluate(
            "(box => {box.focus(); box.value = 'micro_batch_tokens';"
            " box.dispatchEvent(new Event('keyup', {bubbles: true}))})"
            "(document.querySelector('[data-md-component=search-query]'))"
        )
        found = "document.querySelector('.md-search-result__link[href*=\"configuration.html\"]')"
        page.wait_for(f"{found} !== null")
        assert not page.complaints
        assert all(address.startswith(("file:", "data:")) for address in page.requests)
