"""The shape and the words of the code: sizes of files and functions, and retired words."""

import ast
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("src", "tests", "benchmarks", "examples", "docs", "configs", "website")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".toml") and path != Path(__file__)
) + [
    ROOT / name
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")
]

BRITISH = (
    r"\w*(?:behaviour|colour|neighbour|favour|honour)\w*",
    r"\w*(?:optimis|normalis|standardis|quantis|utilis|initialis|summaris|tokenis|serialis)"
    r"(?:e|ed|er|ers|es|ing|ation)\b\w*",
    r"(?:re|de)?centred",
    r"group_centred|maths|licence|whilst|learnt",
)
PRIVATE = (
    r"Drawer|Parcels?|Postbox|Crews?|TrainUnit|EngineInParts|GraphRoom|EngineFleet|fleet",
    r"let_memory_be_shared|done_once|part_from|_bury|_staff|last_words|go_there",
    r"speak_the_same_tokens|are_newer_than|unless told|in vain|one a row|is no more(?! than)",
)
RETIRED = re.compile(rf"\b(?:{'|'.join((*BRITISH, *PRIVATE))})\b", re.IGNORECASE)
# tokens and completions are sampled; only charts are drawn
DRAW = re.compile(r"\b(?:draw|draws|drawn|drew|drawing|drawings)\b", re.IGNORECASE)
CHARTS = re.compile(r"chart|page|report|curve|plot|figure|picture|\bSVG\b|\bline", re.IGNORECASE)
# the grader reads what people write, whichever spelling they use
GRADED = ("math_grading", "test_math", "test_grading")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_retired_words_stay_away(path: Path) -> None:
    if any(part in str(path) for part in GRADED):
        pytest.skip("graded text may be spelled in any way")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = RETIRED.search(line)
        assert found is None, f"{name_of(path)}:{number} has {found[0]!r}"


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_only_charts_are_drawn(path: Path) -> None:
    if CHARTS.search(name_of(path)):
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        # hypothesis and random call it so
        found = DRAW.search(line.replace("data.draw", ""))
        nearby = " ".join(lines[max(number - 3, 0) : number + 4])
        assert not found or CHARTS.search(nearby), f"{name_of(path)}:{number + 1}: {line.strip()}"


def test_the_words_are_found() -> None:
    for text in (
        "the behaviour policy",
        "an Optimiser",
        "16 unless told",
        "EngineFleet(",
        "centred",
    ):
        assert RETIRED.search(text), text
    for text in ("the behavior policy", "optimistic", "an entered value", "two", "exercise"):
        assert not RETIRED.search(text), text
    assert DRAW.search("tokens are drawn")
    assert not DRAW.search("withdrawn")


def test_files_and_functions_are_of_readable_size() -> None:
    lengths = [len(path.read_text().splitlines()) for path in SOURCES]
    assert max(lengths) <= 500, SOURCES[lengths.index(max(lengths))]
    full = [
        length for path, length in zip(SOURCES, lengths, strict=True) if path.stem != "__init__"
    ]
    assert 80 <= statistics.median(full) <= 200, statistics.median(full)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                assert size <= 80, f"{name_of(path)}: {node.name} has {size} lines"
