r"""Comparing the final answer of a completion with the reference.

Two answers are equal if they are the same text after normalization, or have the same form
(`forms`) and equal parts: numbers exactly, formulas by their values (`values`). A reference that
only a computer algebra system can parse, such as a sum or a limit, goes to math-verify (`algebra`).

An ambiguous answer is graded as wrong: the policy quickly learns to exploit a reward for a wrong
answer, while rejecting an unusual spelling costs little.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from trustbatch.errors import RewardError
from trustbatch.math_grading.algebra import equal_by_algebra
from trustbatch.math_grading.extract import final_answer, last_box
from trustbatch.math_grading.forms import Form, is_name, names_value, normalized_words, parse_form
from trustbatch.math_grading.formula import Node, ParseError, parse_formula
from trustbatch.math_grading.normalize import normalize
from trustbatch.math_grading.values import close, equal, proportional

MAX_ANSWER_LENGTH = 10_000
"""characters; longer answers are compared as text only"""
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:/0*[1-9]\d*)?")
_SCIENTIFIC = re.compile(
    r"([-+]?(?:\d+\.\d+|0*1(?=[eE])|\d+(?=E|e\d)|\d(?=e[-+]\d\d)))[eE]([-+]?\d{1,3})"
)
"""2e-1 is left out: it is rather 2e minus 1"""
_TEXT = re.compile(r"\\text\{ ?([A-Za-z][^{}]*?) ?\}")
_MEASURE = re.compile(r"(-?\d+(?:\.\d+)?) ?([A-DF-Za-df-z][A-Za-z]*(?:/[A-Za-z]+)?(?:\^[23])?)")
"""a number and a unit; 2e is a number"""
_PHRASE = re.compile(
    r"^\\text\{ ?(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is)?:? ?(?:\}|(?=-?\d)([^{}]*)\})"
)
"""The answer is 807, in a box"""


@dataclass(frozen=True, slots=True)
class _Rules:
    decimals: int | None
    tolerance: float
    percent: bool
    require_unit: bool


def grade_math(
    completion: str,
    answer: str,
    *,
    require_boxed: bool = False,
    decimals: int | None = None,
    tolerance: float = 0.0,
    percent: bool = False,
    require_unit: bool = False,
    thinking: bool = False,
) -> float:
    r"""1 if the completion's final answer equals the reference, otherwise 0.

    Args:
        completion: the text of the model; `extract` has the rules for finding its answer.
        answer: the reference, in LaTeX or as plain text.
        require_boxed: an answer outside \boxed{} does not count.
        decimals: accept numbers that are equal after rounding to this many decimals.
        tolerance: accept numbers within this relative difference of the reference.
        percent: accept 39 for 39\% and vice versa; 0.39 is always accepted.
        require_unit: if the reference has a unit, the answer must have it, too; otherwise the
            answer may omit the unit, but must not have a different one.
        thinking: the prompt has opened <think>, so only text after </think> is graded.
    """
    if not answer.strip():
        raise RewardError("The reference answer is empty: remove the row, or give it an answer.")
    reference = _reference(answer)
    found = final_answer(
        completion,
        require_boxed=require_boxed,
        is_number=_NUMBER.fullmatch(reference) is not None,
        thinking=thinking,
    )
    if found is None or not found.strip():
        return 0.0
    if len(found) > MAX_ANSWER_LENGTH or len(answer) > MAX_ANSWER_LENGTH:
        return float(found.strip() == answer.strip())
    given = _PHRASE.sub(r"\1", normalize(found)).strip()
    if not given:
        return 0.0
    if given in (reference, reference.replace("{e}", "e")) or _same_measure(given, reference):
        return 1.0
    rules = _Rules(decimals, tolerance, percent, require_unit)
    return float(_forms_equal(_form(given), _form(reference), rules))


def prepare() -> None:
    """Import mpmath in advance, so that its import does not count against a time limit."""
    import mpmath  # noqa: F401


@lru_cache(maxsize=4096)
def _reference(answer: str) -> str:
    """Return the normalized reference, without a surrounding box."""
    boxed = last_box(answer)
    if boxed is not None and boxed[1] is not None:
        answer = answer[boxed[0] : boxed[1]]
    return normalize(answer)


@lru_cache(maxsize=4096)
def _form(text: str) -> Form:
    return parse_form(text)


def _same_measure(given: str, wanted: str) -> bool:
    r"""Whether a number and its unit are the same but for \text around the unit, as in 5 m/s."""
    first, second = (_MEASURE.fullmatch(_TEXT.sub(r"\1", text)) for text in (given, wanted))
    return first is not None and second is not None and first.groups() == second.groups()


def _forms_equal(given: Form, wanted: Form, rules: _Rules) -> bool:
    """Whether an answer has the form of the reference, with equal parts."""
    given, wanted = _without_name(given, wanted), _without_name(wanted, given)
    given, wanted = _unwrap_single(given), _unwrap_single(wanted)
    if given.kind != wanted.kind:
        return _flipped_equal(given, wanted, rules)
    if given.kind == "scalar":
        return _scalars_equal(given, wanted, rules)
    of_two_variables = given.text and wanted.text and given.text != wanted.text
    if of_two_variables or len(given.items) != len(wanted.items):
        return False
    if given.kind in ("list", "union"):
        return _same_items(given.items, wanted.items, rules)
    pairs = zip(given.items, wanted.items, strict=True)
    if all(_forms_equal(a, b, rules) for a, b in pairs):
        return True
    return given.kind == "=" and (
        all(_forms_equal(a, b, rules) for a, b in zip(given.items, wanted.items[::-1], strict=True))
        or _equations_equal(given, wanted)
    )


def _unwrap_single(form: Form) -> Form:
    """Return the element of a one-element list; any other form unchanged."""
    return form.items[0] if form.kind == "list" and len(form.items) == 1 else form


def _without_name(form: Form, other: Form) -> Form:
    """Reduce x = 5 or 2 + 3 = 5 to the value 5 if the other answer has no equals sign."""
    signs = set(form.kind.split(","))
    if signs != {"="} or "=" in other.kind:
        return form
    value, first = form.items[-1], form.items[0]
    before, after = _node(first.text), _node(value.text)
    # in x = 1 = 2 it is undefined which of the two values is meant
    for middle in form.items[1:-1]:
        node = _node(middle.text)
        if node and not node.symbols() and not (after and equal(node, after)):
            return form
    if before and not before.symbols() and first.text not in ("e", "i"):
        if len(form.items) == 2 and is_name(value.text) and after and after.symbols():
            return first  # 5 = x
        # a false equation such as 1 + 1 = 3 has no value
        return value if after and equal(before, after) else form
    return value if names_value(first) else form


def _flipped_equal(given: Form, wanted: Form, rules: _Rules) -> bool:
    """Compare a < b with b > a."""
    flip = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
    flipped = ",".join(flip.get(sign, "") for sign in reversed(given.kind.split(",")))
    if not given.items or flipped != wanted.kind or len(given.items) != len(wanted.items):
        return False
    pairs = zip(reversed(given.items), wanted.items, strict=True)
    return all(_forms_equal(a, b, rules) for a, b in pairs)


def _same_items(given: tuple[Form, ...], wanted: tuple[Form, ...], rules: _Rules) -> bool:
    left = list(wanted)
    for item in given:
        match = next((other for other in left if _forms_equal(item, other, rules)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _equations_equal(given: Form, wanted: Form) -> bool:
    """Whether two equations are equivalent: one is the other times a constant."""
    sides = [_node(item.text) for form in (given, wanted) for item in form.items]
    if len(sides) != 4 or any(side is None for side in sides):
        return False
    a, b, c, d = (side for side in sides if side is not None)
    first = Node("add", (a, Node("negate", (b,))))
    second = Node("add", (c, Node("negate", (d,))))
    return proportional(first, second)


def _scalars_equal(given: Form, wanted: Form, rules: _Rules) -> bool:
    if given.base != wanted.base and (given.base or not wanted.base):
        return False
    if given.unit != wanted.unit and wanted.unit and (given.unit or rules.require_unit):
        return False
    if wanted.base:
        plain = not given.unit and not given.is_percent
        return plain and given.text.lstrip("0") == wanted.text.lstrip("0")
    if given.text == wanted.text and given.is_percent == wanted.is_percent:
        return bool(given.text)
    words = normalized_words(given.text), normalized_words(wanted.text)
    if None not in words and words[0] == words[1]:
        return True
    if any(word is not None and len(word) > 1 for word in words):
        return False
    return _values_equal(given, wanted, rules)


def _values_equal(given: Form, wanted: Form, rules: _Rules) -> bool:
    left, right = _node(given.text), _node(wanted.text)
    if right is None:
        return equal_by_algebra(given.text, left, wanted.text)
    if left is None:
        return False
    candidates = [_scaled(left, given.is_percent)]
    if rules.percent and given.is_percent != wanted.is_percent:
        candidates.append(_scaled(left, wanted.is_percent))
    reference = _scaled(right, wanted.is_percent)
    if any(equal(candidate, reference) for candidate in candidates):
        return True
    if rules.decimals is None and not rules.tolerance:
        return False
    return any(
        close(candidate, reference, decimals=rules.decimals, tolerance=rules.tolerance)
        for candidate in candidates
    )


def _scaled(node: Node, is_percent: bool) -> Node:
    if not is_percent:
        return node
    hundred = Node("number", value=_HUNDRED.value)
    return Node("multiply", (node, Node("reciprocal", (hundred,))))


_HUNDRED = parse_formula("100")


@lru_cache(maxsize=4096)
def _node(text: str) -> Node | None:
    """Return the tree of a formula, or None if the text can't be parsed."""
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific is not None:
        text = r"{}\cdot 10^{{{}}}".format(*scientific.groups())
    try:
        return parse_formula(text)
    except ParseError:
        return None
