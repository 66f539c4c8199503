"""Pages that show files and folders of the repository which are no documentation."""

import ast
from pathlib import Path

LANGUAGES = {".py": "python", ".js": "javascript", ".toml": "toml", ".jsonl": "json"}
UNSEARCHED = "---\nsearch:\n  exclude: true\nhide: [navigation]\n---\n"
"""a search is for the documentation; the code has tools of its own"""
FENCE = "~" * 8
"""longer than any in the files that are shown"""


def source_page(root: Path, path: str) -> str:
    """Return the Markdown of a page that shows a file, or lists the modules of a folder."""
    heading = f"{UNSEARCHED}# {Path(path).name}\n\n`{path}`\n\n"
    if (root / path).is_dir():
        return heading + _listing(root, path)
    language = LANGUAGES.get(Path(path).suffix, "text")
    text = (root / path).read_text(encoding="utf-8")
    return f"{heading}{FENCE}{language}\n{text.rstrip()}\n{FENCE}\n"


def modules(root: Path, path: str) -> list[str]:
    """Return the modules of a folder, which its page links to."""
    return sorted(str(file.relative_to(root)) for file in (root / path).glob("*.py"))


def _listing(root: Path, path: str) -> str:
    # relative to the folder that holds this one, as links of its files are
    folder = Path(path).name
    rows = [
        f"| [`{Path(module).name}`]({folder}/{Path(module).name}) | {_first_line(root / module)} |"
        for module in modules(root, path)
    ]
    return "\n".join(["| module | what it has |", "|---|---|", *rows]) + "\n"


def _first_line(module: Path) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].replace("|", "\\|")
