r"""Grading the countdown game: reach the target with each number used exactly once.

Any expression counts that uses + - * / and brackets, whichever the reference is. It is looked for
in the last <answer>...</answer>, else in the last \boxed{...}, else in the last line; "expression =
target" is fine, and so are \times, \cdot, \div and \frac. The arithmetic is exact.
"""

# ruff: noqa: RUF001 (signs that look alike)
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from trustbatch.math_grading.extract import after_thinking, last_box

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


def grade_countdown(
    completion: str, numbers: Sequence[int], target: int, *, thinking: bool = False
) -> float:
    """1 if the completion's expression has the target's value and uses each number exactly once.

    `thinking` says that the prompt has opened the thinking: only what follows </think> counts.
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
        values = [_Reader(side) for side in sides[1:]]
        reader = _Reader(sides[0])
        value = reader.value()
        if any(other.value() != value for other in values):
            return 0.0
    except (_NoExpression, ZeroDivisionError):
        return 0.0
    return float(value == target and Counter(reader.numbers) == Counter(numbers))


def _expression(completion: str, *, thinking: bool) -> str | None:
    """Return where the expression is said to be; what comes before </think> never counts."""
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


class _NoExpression(ValueError):
    """The text is no expression of the game."""


class _Reader:
    """Evaluates while it reads; keeps the numbers that it met."""

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
        if self.here is not None:
            raise _NoExpression
        return result

    @property
    def here(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> str:
        token = self.here
        if token is None:
            raise _NoExpression
        self.position += 1
        return token

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _NoExpression
        total = self.product(depth)
        while self.here in ("+", "-"):
            sign = self.take()
            term = self.product(depth)
            total += term if sign == "+" else -term
        return total

    def product(self, depth: int) -> Fraction:
        result = self.factor(depth)
        while self.here in ("*", "/"):
            operator = self.take()
            factor = self.factor(depth)
            result = result * factor if operator == "*" else result / factor
        return result

    def factor(self, depth: int) -> Fraction:
        token = self.take()
        if token == "-" and self.here != "-":
            return -self.factor(depth + 1)
        if token.isascii() and token.isdigit():
            self.numbers.append(int(token))
            return Fraction(int(token))
        if token in ("(", "{"):
            return self.group(token, depth)
        if token == "\x00":
            above = self.group(self.take(), depth)
            return above / self.group(self.take(), depth)
        raise _NoExpression

    def group(self, opening: str, depth: int) -> Fraction:
        result = self.sum(depth + 1)
        if opening not in "({" or self.take() != {"(": ")", "{": "}"}[opening]:
            raise _NoExpression
        return result
