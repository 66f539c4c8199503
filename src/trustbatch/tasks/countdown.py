r"""Countdown: write an expression of given numbers that has a given value.

Any expression counts that uses + - * / and brackets and each number exactly once. The grader takes
it from the last <answer>...</answer>, else the last \boxed{...}, else the last line; "expression =
target" is accepted, and so are \times, \cdot, \div and \frac. The arithmetic is exact.
"""

# ruff: noqa: RUF001 (look-alike characters in expressions)
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, ClassVar

from trustbatch.math_grading.extract import after_thinking, last_box
from trustbatch.tasks.hub_data import HubDataset
from trustbatch.tasks.problems import ProblemTask
from trustbatch.tasks.rows import BadRow
from trustbatch.types import Prompt

NUM_TEST_ROWS = 1024
"""the hub's data has one split, whose first rows are used for evaluation"""
PROBLEM = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic "
    "arithmetic operations (+, -, *, /) and each number must be used exactly once."
)

MAX_LENGTH = 1000
MAX_DEPTH = 40
_TOKEN = re.compile(r"\s*(?:(\d{1,15})|(.))", re.DOTALL)
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;!() ]|\$|`", " "),
        (r"\\(?:times|cdot|ast)(?![a-zA-Z])|[×·⋅∗]", "*"),
        (r"\\div(?![a-zA-Z])|[÷∕⁄]", "/"),
        (r"[−–]", "-"),
        (r"\\[dt]?frac\s*", "\\\\frac"),
        (r"[\[]", "("),
        (r"[\]]", ")"),
    )
]


@dataclass(frozen=True, kw_only=True)
class Countdown(ProblemTask):
    """Three or four numbers; any expression that uses each of them once is correct."""

    hub: ClassVar[HubDataset] = HubDataset(
        "Jiayi-Pan/Countdown-Tasks-3to4",
        {"train": "data/train-*.parquet", "test": "data/train-*.parquet"},
    )

    name: str = "countdown"

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of a file, or those of a split of the hub's data."""
        rows = super().rows()
        if self.path is not None:
            return rows
        if self.split == "test":
            return islice(rows, NUM_TEST_ROWS)
        return islice(rows, NUM_TEST_ROWS, None)

    def standard_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub's rows have numbers, but neither a text nor a reference expression."""
        if "nums" not in row or "target" not in row:
            raise BadRow(f"has the fields {', '.join(row)}", fix="give it nums and target")
        problem = PROBLEM.format(numbers=list(row["nums"]), target=row["target"])
        return {"problem": problem, "answer": str(row["target"]), **row}

    def details(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers and the target value."""
        return {"numbers": [int(number) for number in row["nums"]], "target": int(row["target"])}

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 for an expression that uses each number once and has the value; otherwise 0."""
        return grade_countdown(
            completion,
            prompt.details["numbers"],
            prompt.details["target"],
            thinking=bool(self.thinking),
        )


def grade_countdown(
    completion: str, numbers: Sequence[int], target: int, *, thinking: bool = False
) -> float:
    """1 if the completion's expression has the target's value and uses each number exactly once.

    `thinking`: the prompt has opened <think>, so only the text after </think> counts.
    """
    text = _expression(completion, thinking=thinking)
    if text is None or len(text) > MAX_LENGTH:
        return 0.0
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".").strip()
    sides = text.split("=")
    if len(sides) == 2 and sides[0].strip() == str(target):
        sides.reverse()
    try:
        values = [_Parser(side) for side in sides[1:]]
        parser = _Parser(sides[0])
        value = parser.value()
        if any(other.value() != value for other in values):
            return 0.0
    except (_ParseError, ZeroDivisionError):
        return 0.0
    return float(value == target and Counter(parser.numbers) == Counter(numbers))


def _expression(completion: str, *, thinking: bool) -> str | None:
    """Return the part of a completion that has the expression; None if there is none."""
    text = after_thinking(completion, thinking=thinking)
    if text is None:
        return None
    start = text.rfind("<answer>")
    if start >= 0:
        inner, closed, _ = text[start + len("<answer>") :].partition("</answer>")
        if not closed:
            return None
        text = inner
    boxed = last_box(text)
    if boxed is not None:
        return None if boxed[1] is None else text[boxed[0] : boxed[1]]
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


class _ParseError(ValueError):
    """The text is not a valid expression."""


class _Parser:
    """Evaluates an expression while parsing it, and records the numbers in it."""

    def __init__(self, text: str) -> None:
        self.tokens = [
            digits or other for digits, other in _TOKEN.findall(text.replace("\\frac", "\x00"))
        ]
        self.tokens = [token for token in self.tokens if token.strip(" ")]
        self.position = 0
        self.numbers: list[int] = []

    def value(self) -> Fraction:
        """Return the value of the whole text."""
        result = self.sum(0)
        if self.current is not None:
            raise _ParseError
        return result

    @property
    def current(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> str:
        token = self.current
        if token is None:
            raise _ParseError
        self.position += 1
        return token

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _ParseError
        total = self.product(depth)
        while self.current in ("+", "-"):
            sign = self.take()
            term = self.product(depth)
            total += term if sign == "+" else -term
        return total

    def product(self, depth: int) -> Fraction:
        result = self.factor(depth)
        while self.current in ("*", "/"):
            operator = self.take()
            factor = self.factor(depth)
            result = result * factor if operator == "*" else result / factor
        return result

    def factor(self, depth: int) -> Fraction:
        token = self.take()
        if token == "-" and self.current != "-":
            return -self.factor(depth + 1)
        if token.isascii() and token.isdigit():
            self.numbers.append(int(token))
            return Fraction(int(token))
        if token in ("(", "{"):
            return self.group(token, depth)
        if token == "\x00":
            above = self.group(self.take(), depth)
            return above / self.group(self.take(), depth)
        raise _ParseError

    def group(self, opening: str, depth: int) -> Fraction:
        result = self.sum(depth + 1)
        if opening not in "({" or self.take() != {"(": ")", "{": "}"}[opening]:
            raise _ParseError
        return result
