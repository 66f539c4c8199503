r"""Pairs of a real answer and another text whose equality is known by construction.

Each rewrite has the same value as the answer, and each near miss another one. Which rules apply
depends on the answer: a whole number, a decimal, a fraction, a formula, a tuple or a list. Answers
of other kinds, such as words and equations, are only rewritten.
"""

import gzip
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

_WHOLE = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d+\.\d+")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_FORMULA = re.compile(r"(?:[\dA-Za-z+*/^(){}\s.-]|\\(?:frac|sqrt|pi|cdot|ln|left|right)(?![a-z]))+")
_ROOT = re.compile(r"-?\d*\\sqrt\{\d+\}|-?\\frac\{\d*\\(?:sqrt\{\d+\}|pi)\}\{\d+\}|-?\d+\\pi")
_MEASURE = re.compile(r"(-?\d+(?:\.\d+)?)\s*(\\%|\^\\circ|\^\{\\circ\})")
_SQUARE_ROOT = re.compile(r"(\d+)\\sqrt\{(\d+)\}")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
_ITEMS = re.compile(r"(\(?)(-?\d+(?:\s*,\s*-?\d+)+)(\)?)")


@dataclass(frozen=True)
class Pair:
    """A reference, what a completion gives instead, and whether both are equal."""

    answer: str
    given: str
    is_equal: bool
    rule: str


def real_answers(folder: Path, names: tuple[str, ...]) -> list[str]:
    """Return the distinct answers of some files, in their order."""
    found: dict[str, None] = {}
    for name in names:
        with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            found |= {str(json.loads(line)["answer"]).strip(): None for line in lines}
    return list(found)


def build_pairs(answers: list[str], rng: random.Random) -> list[Pair]:
    """Return one rewrite and, where the kind of answer has rules for it, one near miss of each."""
    pairs = []
    for answer in answers:
        if answer.count("{") != answer.count("}"):
            continue  # cut off
        equal, different = _rules_for(answer)
        for rules, is_equal in ((equal, True), (different, False)):
            if rules:
                rule = rng.choice(sorted(rules))
                pairs.append(Pair(answer, rules[rule](), is_equal, rule))
    return pairs


def _rules_for(answer: str) -> tuple[dict[str, Callable[[], str]], dict[str, Callable[[], str]]]:
    fraction, items = _FRACTION.fullmatch(answer), _ITEMS.fullmatch(answer)
    if _WHOLE.fullmatch(answer):
        return _whole_number(int(answer))
    if _DECIMAL.fullmatch(answer):
        return _decimal(answer)
    if fraction and int(fraction[3]):
        return _fraction(-1 if fraction[1] else 1, int(fraction[2]), int(fraction[3]))
    if items and bool(items[1]) == bool(items[3]) and not _THOUSANDS.fullmatch(answer):
        return _several([each.strip() for each in items[2].split(",")], is_tuple=bool(items[1]))
    measure = _MEASURE.fullmatch(answer)
    if measure:
        return _measure(measure[1], measure[2])
    spelled = _spellings(answer)
    if _is_formula(answer):
        same, different = _formula(answer)
        return spelled | same, different
    return spelled, {}


def _is_formula(text: str) -> bool:
    """Whether a text is one formula, without a word or an ellipsis in it."""
    return (
        _FORMULA.fullmatch(text) is not None
        and text.count("(") == text.count(")")
        and re.search(
            r"(?<![\\a-z])[a-z]{3}|^[A-Z]+$|\.$|\.\.|\d\s+\d|/\d+[a-z(]", text, re.IGNORECASE
        )
        is None
    )


def _spellings(text: str) -> dict[str, Callable[[], str]]:
    return {
        "displaystyle": lambda: rf"\displaystyle {text}",
        "dfrac": lambda: text.replace(r"\frac", r"\dfrac"),
        "left and right": lambda: (
            re.sub(r"(?<!\\right)(?<!f)\)", r"\\right)", re.sub(r"(?<!\\left)\(", r"\\left(", text))
            if r"\left" not in text and r"\(" not in text
            else text
        ),
        "spaces": lambda: re.sub(r"([-+=,])", r" \1 ", text),
        "period": lambda: f"{text}.",
    }


def _whole_number(n: int) -> tuple[dict[str, Callable[[], str]], dict[str, Callable[[], str]]]:
    same: dict[str, Callable[[], str]] = {
        "n.0": lambda: f"{n}.0",
        "thousands": lambda: f"{n:,}",
        "thousands in LaTeX": lambda: f"{n:,}".replace(",", r"{,}"),
        "fraction": lambda: rf"\frac{{{3 * n}}}{{3}}",
        "name": lambda: f"x = {n}",
        "sum": lambda: f"{n - 7} + 7",
        "dollars": lambda: f"${n}$",
        "text": lambda: rf"\text{{{n}}}",
        "phrase": lambda: rf"\text{{The answer is }} {n}",
        "unit": lambda: rf"{n} \text{{ ways}}",
        "sign": lambda: f"+{n}" if n >= 0 else rf"-{-n}",
    }
    other: dict[str, Callable[[], str]] = {
        "one more": lambda: str(n + 1),
        "one less": lambda: str(n - 1),
        "negative": lambda: str(-n if n else -1),
        "a digit more": lambda: f"{n}0" if n else "10",
        "decimals": lambda: f"{n}.5",
        "percent": lambda: rf"{n if n else 1}\%",
        "list": lambda: f"{n}, {n + 1}",
        "tuple": lambda: f"({n}, {n})",
        "million": lambda: rf"{n if n else 1}\text{{ million}}",
        "interval": lambda: f"x > {n}",
        "either": lambda: rf"{n} \text{{ or }} {n + 1}",
        "variable": lambda: f"{n if n else 1}x",
        "power": lambda: f"{n if abs(n) > 1 else 3}^2",
        "not": lambda: rf"\text{{not }} {n}",
    }
    return same, other


def _decimal(text: str) -> tuple[dict[str, Callable[[], str]], dict[str, Callable[[], str]]]:
    value = Fraction(text)
    last = 1 if text[-1] != "9" else -1
    return {
        "zero": lambda: f"{text}0",
        "fraction": lambda: rf"\frac{{{value.numerator}}}{{{value.denominator}}}",
        "slash": lambda: f"{value.numerator}/{value.denominator}",
        "name": lambda: f"x = {text}",
    }, {
        "last digit": lambda: f"{text[:-1]}{int(text[-1]) + last}",
        "a digit more": lambda: f"{text}1",
        "negative": lambda: text[1:] if value < 0 else f"-{text}" if value else "1",
        "point": lambda: text.replace(".", "") if value else "1",
        "percent": lambda: rf"{text}\%" if value else "1",
    }


def _fraction(
    sign: int, above: int, below: int
) -> tuple[dict[str, Callable[[], str]], dict[str, Callable[[], str]]]:
    minus = "-" if sign < 0 else ""
    same: dict[str, Callable[[], str]] = {
        "slash": lambda: f"{minus}{above}/{below}",
        "dfrac": lambda: rf"{minus}\dfrac{{{above}}}{{{below}}}",
        "expanded": lambda: rf"{minus}\frac{{{3 * above}}}{{{3 * below}}}",
        "minus inside": lambda: rf"\frac{{{sign * above}}}{{{below}}}",
        "name": lambda: rf"x = {minus}\frac{{{above}}}{{{below}}}",
        "division": lambda: rf"{minus}{above} \div {below}",
    }
    if above > below and above % below:
        same["mixed"] = lambda: rf"{minus}{above // below}\frac{{{above % below}}}{{{below}}}"
    digits = Fraction(above * 10**6, below)
    if digits.denominator == 1:
        same["decimal"] = lambda: f"{minus}{Decimal(above) / Decimal(below)}"
    different: dict[str, Callable[[], str]] = {
        "above": lambda: rf"{minus}\frac{{{above + 1}}}{{{below}}}",
        "below": lambda: rf"{minus}\frac{{{above or 1}}}{{{below + 1}}}",
        "negative": lambda: rf"{'' if minus else '-'}\frac{{{above or 1}}}{{{below}}}",
        "without the line": lambda: f"{minus}{above}, {below}",
    }
    if above != below and above:
        different["inverted"] = lambda: rf"{minus}\frac{{{below}}}{{{above}}}"
    if digits.denominator != 1:
        different["rounded"] = lambda: f"{minus}{above / below:.3f}"
    return same, different


def _several(
    items: list[str], *, is_tuple: bool
) -> tuple[dict[str, Callable[[], str]], dict[str, Callable[[], str]]]:
    around = "({})" if is_tuple else "{}"

    def joined(parts: list[str], separator: str = ", ") -> str:
        return around.format(separator.join(parts))

    same: dict[str, Callable[[], str]] = {
        "n.0": lambda: joined([f"{items[0]}.0", *items[1:]]),
        "fraction": lambda: joined([rf"\frac{{{2 * int(items[0])}}}{{2}}", *items[1:]]),
    }
    different: dict[str, Callable[[], str]] = {
        "one more": lambda: joined([str(int(items[0]) + 1), *items[1:]]),
        "one left out": lambda: joined(items[:-1]) if len(items) > 2 else items[0],
        "one twice": lambda: joined([*items, items[0]]),
        "brackets": lambda: f"[{', '.join(items)}]" if is_tuple else f"({', '.join(items)})",
    }
    if items[::-1] != items:
        rules = different if is_tuple else same
        rules["reversed"] = lambda: joined(items[::-1])
    return same, different


def _formula(text: str) -> tuple[dict[str, Callable[[], str]], dict[str, Callable[[], str]]]:
    different: dict[str, Callable[[], str]] = {
        "one more": lambda: f"{text} + 1",
        "a little more": lambda: rf"{text} + 10^{{-9}}",
        "list": lambda: f"{text}, 1",
        "interval": lambda: f"x > {text}",
    }
    if _ROOT.fullmatch(text) and "0" not in text:
        different["negative"] = lambda: text.removeprefix("-") if text[0] == "-" else f"-{text}"
        different["a number"] = lambda: re.sub(r"\d+", lambda n: str(int(n[0]) + 1), text, count=1)
    same: dict[str, Callable[[], str]] = {}
    root = _SQUARE_ROOT.fullmatch(text)
    if root:
        whole, inner = int(root[1]), int(root[2])
        same["one root"] = lambda: rf"\sqrt{{{whole * whole * inner}}}"
        same["rationalized"] = lambda: rf"\frac{{{whole * inner}}}{{\sqrt{{{inner}}}}}"
        different["root of another"] = lambda: rf"\sqrt{{{whole * inner + whole * whole * inner}}}"
    return same | {
        "plus and minus": lambda: f"{text} + 1 - 1",
        "times": lambda: rf"1 \cdot \left({text}\right)",
        "twice the half": lambda: rf"\frac{{2({text})}}{{2}}",
        "name": lambda: f"z = {text}",
        "brackets": lambda: f"({text})",
    }, different


def _measure(
    number: str, sign: str
) -> tuple[dict[str, Callable[[], str]], dict[str, Callable[[], str]]]:
    """Per cent, and angles in degrees."""
    more = str(Decimal(number) + 1)
    if sign == r"\%":
        return {
            "fraction": lambda: rf"\frac{{{number}}}{{100}}",
            "decimal": lambda: f"{Decimal(number) / 100:f}",
            "word": lambda: rf"{number}\text{{ percent}}",
        }, {
            "one more": lambda: rf"{more}\%",
            "a tenth": lambda: rf"{Decimal(number) / 10:f}\%" if Decimal(number) else r"1\%",
        }
    return {
        "left out": lambda: number,
        "braces": lambda: rf"{number}^{{\circ}}",
        "sign": lambda: f"{number}°",
        "word": lambda: rf"{number}\text{{ degrees}}",
    }, {
        "one more": lambda: rf"{more}^\circ",
        "percent": lambda: rf"{number}\%" if Decimal(number) else "1",
        "radians": lambda: rf"{number}\pi" if Decimal(number) else "1",
    }
