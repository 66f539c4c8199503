"""Links between files of the repository, as links between pages of the site."""

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks/README.md",
    "benchmarks/RESULTS.md": "benchmarks/RESULTS.md",
    "examples/quickstart.ipynb": "quickstart.md",
}
"""files outside of docs/ that are pages of the site, by their paths in the repository"""
SOURCE = "source"
"""where other files that a page links to are shown"""

_FILES = {page: file for file, page in PAGES.items()}
_CODE_OR_LINK = re.compile(
    r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)|`[^`\n]+`|\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def page_of(file: str) -> str:
    """Return the page that shows a file or folder of the repository."""
    if file in PAGES:
        return PAGES[file]
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return f"{SOURCE}/{file}.md"


def file_of(page: str) -> str:
    """Return the file of the repository that a page shows."""
    if page in _FILES:
        return _FILES[page]
    if page.startswith(f"{SOURCE}/"):
        return page.removeprefix(f"{SOURCE}/").removesuffix(".md")
    return f"docs/{page}"


def linked_files(text: str, file: str) -> Iterator[str]:
    """Yield the files and folders of the repository that the text of a file links to."""
    for match in _CODE_OR_LINK.finditer(text):
        target = match["target"]
        if target and not _is_elsewhere(target):
            yield _resolved(target, file)


def with_site_links(text: str, page: str) -> str:
    """Replace links to files of the repository by links to the pages that show them."""
    return _replaced(text, lambda target: _site_link(target, page))


def _replaced(text: str, new_target: Callable[[str], str]) -> str:
    def replace(match: re.Match[str]) -> str:
        target = match["target"]
        return match[0] if target is None else f"]({new_target(target)})"

    return _CODE_OR_LINK.sub(replace, text)


def _site_link(target: str, page: str) -> str:
    if _is_elsewhere(target):
        return target
    linked = page_of(_resolved(target, file_of(page)))
    _, mark, anchor = target.partition("#")
    return posixpath.relpath(linked, posixpath.dirname(page) or ".") + mark + anchor


def _is_elsewhere(target: str) -> bool:
    """Return whether a link leads to another host, or to a heading of its own page."""
    return target.startswith("#") or re.match(r"[a-z]+:", target) is not None


def _resolved(target: str, file: str) -> str:
    path, _, _ = target.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
