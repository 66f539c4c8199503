"""The pages in docs/ agree with the code: keys, defaults, examples, quotations and links."""

import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from trustbatch.advantages import ADVANTAGES
from trustbatch.config import Config, parse_config
from trustbatch.objectives import OBJECTIVES
from trustbatch.tasks import TASKS, Curriculum
from trustbatch.tasks.config import TaskConfig
from trustbatch.utils.options import option_names
from trustbatch.utils.tables import Choice, Table, table_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
OBJECTIVE_PAGES = sorted((DOCS / "objectives").glob("*.md"))
REQUIRED = object()

CODE_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
TABLE_ROW = re.compile(r"^\| `([a-z_.]+)` \|(.*)\|$", re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def code_blocks(path: Path, language: str) -> list[str]:
    return [code for kind, code in CODE_BLOCK.findall(read(path)) if kind == language]


def run_block(path: Path, code: str, names: dict[str, Any]) -> None:
    # blank lines before it, so that a traceback points at the line of the page
    lines_before = read(path).split(code)[0].count("\n")
    exec(compile("\n" * lines_before + code, path, "exec"), names)


def defaults_of_config(model: type[Table] = Config, prefix: str = "") -> Iterator[Any]:
    """Every dotted key of the configuration with its default; not the options of choices."""
    for name, field in model.model_fields.items():
        # a list of tables is documented as a table
        table = table_of(field.annotation)
        if table is not None and f"{prefix}{name}" != "evaluation.suite":
            yield from defaults_of_config(table, f"{prefix}{name}.")
        elif not (issubclass(model, Choice) and name == "options"):
            required = field.default is PydanticUndefined
            yield f"{prefix}{name}", REQUIRED if required else field.default


def defaults_of_advantages() -> Iterator[Any]:
    for function in ADVANTAGES.values():
        parameters = inspect.signature(function).parameters
        for option in option_names(function, hidden=("rewards",)):
            yield f"advantage.{option}", parameters[option].default


def defaults_of_tasks() -> Iterator[Any]:
    tables = [("task", kind) for kind in TASKS.values()] + [("task.curriculum", Curriculum)]
    for table, kind in tables:
        for field in fields(kind):
            if field.init and field.name not in ("seed", "name", "task"):
                default = REQUIRED if field.default is MISSING else field.default
                yield f"{table}.{field.name}", default


def defaults_in_tables(path: Path, *, column: int) -> dict[str, Any]:
    """Key and default of each table row that starts with a key in backticks."""
    found = {}
    for key, rest in TABLE_ROW.findall(read(path)):
        cell = rest.split(" | ")[column].strip()
        if cell == "required":
            found[key] = REQUIRED
        elif cell == "unset":
            found[key] = None
        elif cell.startswith("`") and cell.endswith("`"):
            found[key] = tomllib.loads(f"value = {cell.strip('`')}")["value"]
    return found


def test_the_configuration_page_has_every_key_with_its_default() -> None:
    sources = (defaults_of_config(), defaults_of_tasks(), defaults_of_advantages())
    expected = {key: default for source in sources for key, default in source}
    expected = {k: list(v) if isinstance(v, tuple) else v for k, v in expected.items()}
    assert defaults_in_tables(DOCS / "configuration.md", column=1) == expected


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_objective_has_a_page_with_its_options_and_their_defaults(name: str) -> None:
    documented = defaults_in_tables(DOCS / "objectives" / f"{name}.md", column=0)
    assert documented == {field.name: field.default for field in fields(OBJECTIVES[name])}
    assert f"[`{name}`]({name}.md)" in read(DOCS / "objectives" / "README.md")
    assert f"(objectives/{name}.md)" in read(DOCS / "configuration.md")


@pytest.mark.parametrize("path", OBJECTIVE_PAGES, ids=name_of)
def test_python_blocks_quote_the_source_or_run(path: Path) -> None:
    """The blocks of a page share their names, as a reader would type them in one session."""
    sources = [read(file) for file in (ROOT / "src/trustbatch/objectives").glob("*.py")]
    names: dict[str, Any] = {}
    blocks = code_blocks(path, "python")
    assert blocks, "an objective's page shows the code that matters"
    for code in blocks:
        if not any(code in source for source in sources):
            run_block(path, code, names)


def test_the_arithmetic_of_the_page_about_the_paper_is_right() -> None:
    (code,) = code_blocks(DOCS / "paper.md", "python")
    run_block(DOCS / "paper.md", code, {})


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_toml_blocks_are_valid_configurations(path: Path) -> None:
    for code in code_blocks(path, "toml"):
        tree = tomllib.loads(code)
        tree.setdefault("model", {"name": "some-model"})
        tree.setdefault("task", {"name": "arithmetic"})
        config = parse_config(tree)
        # the parts of a mixture are checked when it is built, which needs their files
        for part in config.task.options.get("parts", []):
            own = {key: part[key] for key in part if key not in ("name", "weight", "label")}
            TaskConfig.model_validate({"name": part["name"], **own})


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", CODE_BLOCK.sub("", read(path)))
    for match in LINK.finditer(prose):
        target = match.group(1) or match.group(2)
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{name_of(path)} links to {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{name_of(path)} links to {target}"


def test_the_package_map_names_every_package() -> None:
    table = read(DOCS / "architecture.md").split("## Package map")[1].split("## Layers")[0]
    named = set(re.findall(r"^\| `(\w+)(?:\.py)?` \|", table, re.MULTILINE))
    source = ROOT / "src" / "trustbatch"
    packages = {file.parent.name for file in source.glob("*/__init__.py")}
    assert packages <= named
    layers = read(DOCS / "architecture.md").split("## Layers")[1].split("## The path")[0]
    assert set(re.findall(r"\w+", "".join(re.findall(r"^    .*$", layers, re.MULTILINE)))) == named


def anchors(path: Path) -> set[str]:
    """Headings as GitHub turns them into anchors: lower case, no punctuation, hyphens."""
    headings = re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", read(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


def test_the_readers_of_pages_see_what_they_should(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What *e* says, or not\n| `a.b` | integer | `1e-5` | why |\n"
        "| `c` | string | required | w |\n```toml\nx = 1\n```\n```python\ny\n```\n"
    )
    assert defaults_in_tables(page, column=1) == {"a.b": 1e-5, "c": REQUIRED}
    assert code_blocks(page, "toml") == ["x = 1\n"]
    assert anchors(page) == {"what-e-says-or-not"}
    assert [m.group(1) or m.group(2) for m in LINK.finditer('[a](b.md#c) <img src="d.svg">')] == [
        "b.md#c",
        "d.svg",
    ]
