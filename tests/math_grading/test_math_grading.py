"""The math grader: never a reward for a wrong answer, never a hang."""

import gzip
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.shared_data import shared_data

from trustbatch.errors import RewardError
from trustbatch.math_grading import algebra
from trustbatch.math_grading.extract import final_answer
from trustbatch.math_grading.formula import ParseError, parse_formula
from trustbatch.math_grading.grade import grade_math
from trustbatch.math_grading.values import equal

PAIRS = Path(__file__).parents[1] / "data" / "grader_pairs.jsonl"
EVALUATION_FILES = [
    "aime24", "aime25", "aime26", "amc23", "amo_bench_p", "math500", "gsm8k_train", "gsm8k_test",
    "deepscaler_preview_31k",
]  # fmt: skip


def pairs() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]


def rows(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(shared_data(f"{name}.jsonl.gz"), "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def boxed(text: str) -> str:
    return "\\boxed{" + text + "}"


def test_the_table_is_large_and_on_both_sides() -> None:
    table = pairs()
    assert len({(pair["completion"], pair["answer"]) for pair in table}) >= 400
    assert sum(pair["reward"] for pair in table) >= 150
    assert sum(1 - pair["reward"] for pair in table) >= 200


@pytest.mark.parametrize("reward", [1.0, 0.0])
def test_every_pair_of_the_table(reward: float) -> None:
    table = [pair for pair in pairs() if pair["reward"] == reward]
    other = [p for p in table if grade_math(p["completion"], p["answer"]) != reward]
    assert other == []


HOSTILE = {
    "letters": ("x" * 100_000, "5", 0.0),
    "one long number": ("1" * 100_000, "1", 0.0),
    "boxes that never close": ("\\boxed{" * 20_000, "5", 0.0),
    "braces": (boxed("{" * 50_000 + "5" + "}" * 50_000), "5", 0.0),
    "a number too long for Python": (boxed("9" * 100_000), "9", 0.0),
    "the same number": (boxed("9" * 100_000), "9" * 100_000, 1.0),
    "a tower of fractions": (boxed(r"\frac{1}{" * 500 + "2" + "}" * 500), "2", 0.0),
    "very long fractions": (boxed(rf"\frac{{{'7' * 900}}}{{{'3' * 900}}}"), r"\frac{7}{3}", 1.0),
    "round brackets": (boxed("(" * 900 + "5" + ")" * 900), "6", 0.0),
    "signs": (boxed("-" * 1500 + "5"), "5", 0.0),
    "a long sum": (boxed("1+" * 900 + "1"), "901", 1.0),
    "a long sum that is wrong": (boxed("1+" * 900 + "1"), "900", 0.0),
    "a long product": (boxed("2*" * 900 + "1"), "2^{900}", 1.0),
    "a long quotient": (boxed("1/" * 900 + "1"), "1", 1.0),
    "a long list": (boxed(",".join(["1"] * 3000)), "1", 0.0),
    "roots": (boxed(r"\sqrt" * 900 + "2"), "2", 0.0),
    "dollars": (boxed("$" * 99_999), "5", 0.0),
    "backslashes": (boxed("\\" * 9_998), "5", 0.0),
    "texts in texts": (boxed(r"\text{" * 1500 + "5" + "}" * 1500), "5", 0.0),
    "bars": (boxed("|" * 1500), "5", 0.0),
    "subscripts": (boxed("x_{" * 300 + "1" + "}" * 300), "5", 0.0),
    "commas and digits": (boxed("1," * 4_000), "5", 0.0),
    "spaces": (boxed(" " * 9_000 + "5"), "5", 1.0),
    "primes": (boxed("x" + "'" * 1500), "x", 0.0),
    "degrees": (boxed("5" + r"^\circ" * 500), "5", 0.0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_graded_quickly(name: str) -> None:
    completion, answer, reward = HOSTILE[name]
    start = time.perf_counter()
    assert grade_math(completion, answer) == reward
    assert time.perf_counter() - start < 1.0


BOMBS = [
    "9^{9^{9^9}}", "9^{9^9}", "10^{100000000}", "1000000000!", "((10!)!)!", "2^{-10^{12}}",
    r"\binom{1000000000}{500000000}", r"\sin(10^{10^{10}})", "e^{e^{e^{e^{e}}}}", "x^{10^{9}}",
    "(1+x)^{99999}", r"\sqrt[10^{9}]{2}", r"\frac{1}{9^{9^{9^9}}}", "(99!)^{99!}", "10^{10^{100}}",
    r"\lfloor 9^{9^9} \rfloor", r"\ln(9^{9^{9^9}})", "x!^{x!^{x!}}", r"\cos(99999999999!)",
    "i^{9^{9^9}}", "0.5^{9^{9^9}}",
]  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("answer", ["9", "x", r"\sqrt{2}", "9^{9^9}-1"])
def test_bombs_do_not_go_off(bomb: str, answer: str) -> None:
    start = time.perf_counter()
    assert grade_math(boxed(bomb), answer) == 0.0
    assert grade_math(boxed(answer), bomb) == 0.0
    assert grade_math(boxed(bomb), bomb) == 1.0
    assert time.perf_counter() - start < 1.0


def test_options_say_what_else_counts() -> None:
    assert grade_math("it is 5", "5", require_boxed=True) == 0.0
    assert grade_math(boxed("5"), "5", require_boxed=True) == 1.0
    assert grade_math(boxed("3.14"), r"\pi") == 0.0
    assert grade_math(boxed("3.14"), r"\pi", decimals=2) == 1.0
    assert grade_math(boxed("3.15"), r"\pi", decimals=2) == 0.0
    assert grade_math(boxed("3.1"), r"\pi", decimals=2) == 0.0
    assert grade_math(boxed("101"), "100", tolerance=0.01) == 1.0
    assert grade_math(boxed("102"), "100", tolerance=0.01) == 0.0
    assert grade_math(boxed("x+0.001"), "x", tolerance=0.1, decimals=1) == 0.0
    assert grade_math(boxed("3.1+i"), r"\pi", decimals=0) == 0.0
    assert grade_math(boxed("(3.14, 2)"), r"(\pi, 2)", decimals=2) == 1.0
    assert grade_math(boxed("39"), r"39\%", percent=True) == 1.0
    assert grade_math(boxed(r"39\%"), "39", percent=True) == 1.0
    assert grade_math(boxed("0.39"), "39", percent=True) == 0.0
    assert grade_math(boxed("5"), r"5\text{ cm}", require_unit=True) == 0.0
    assert grade_math(boxed(r"5\text{ cm}"), r"5\text{ cm}", require_unit=True) == 1.0


def test_thinking_that_the_prompt_has_opened_must_end() -> None:
    unfinished = rf"I think maybe {boxed('5')}? Let me check agai"
    assert grade_math(unfinished, "5", thinking=True) == 0.0
    assert grade_math(f"{boxed('4')}</think>{boxed('5')}", "5", thinking=True) == 1.0
    assert grade_math(f"{boxed('5')}</think>", "5", thinking=True) == 0.0
    assert grade_math(unfinished, "5") == 1.0


def test_an_empty_reference_is_an_error() -> None:
    with pytest.raises(RewardError, match="reference answer is empty"):
        grade_math(boxed("5"), " ")


def test_without_math_verify_only_what_needs_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "has_math_verify", lambda: False)
    assert grade_math(boxed(r"\frac{\sqrt{8}}{2}"), r"\sqrt{2}") == 1.0
    assert grade_math(boxed(r"(1, \frac{1}{2}]"), "(1, 0.5]") == 1.0
    assert grade_math(boxed("no formula"), r"\sqrt{2}") == 0.0
    with pytest.raises(RewardError, match=r"pip install 'trustbatch\[math\]'"):
        grade_math(boxed("55"), r"\sum_{k=1}^{10} k")


@pytest.mark.parametrize("name", EVALUATION_FILES)
def test_real_answers_equal_themselves(name: str) -> None:
    """In a box, and in another spelling that is only equal when parsed as a formula."""
    answers = [str(row["answer"]) for row in rows(name)]
    same = [grade_math(f"so {boxed(answer)}.", answer) for answer in answers]
    assert sum(same) >= 0.99 * len(answers)
    spaced = [grade_math(boxed(f"z = {answer}"), answer) for answer in answers[:2000]]
    assert sum(spaced) >= 0.95 * len(spaced)


@pytest.mark.parametrize("name", ["math500", "deepscaler_preview_31k"])
def test_real_answers_differ_from_their_neighbors(name: str) -> None:
    """Where the grader calls two of them equal, it does so both ways round."""
    answers = sorted({str(row["answer"]) for row in rows(name)})[:4000]
    for answer, other in itertools.pairwise(answers):
        # a base may be left out, but not be invented
        if "_" not in other and grade_math(boxed(answer), other):
            assert grade_math(boxed(other), answer), (answer, other)


NUMBERS = st.integers(-(10**12), 10**12)


@settings(max_examples=200, deadline=None)
@given(NUMBERS, NUMBERS)
def test_numbers_are_equal_only_to_themselves(a: int, b: int) -> None:
    assert grade_math(boxed(str(a)), str(b)) == float(a == b)
    assert grade_math(boxed(f"{a:,}"), str(a)) == 1.0
    assert grade_math(boxed(f"{a}.0"), str(a)) == 1.0
    assert grade_math(f"I think it is {a}", str(a)) == 1.0


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_any_text_gets_a_grade(text: str) -> None:
    assert grade_math(boxed(text), "123454321") in (0.0, 1.0)
    assert grade_math(text, r"\frac{\sqrt{3}}{17}") == 0.0
    assert final_answer(text, require_boxed=True) is None or "boxed" in text or "fbox" in text


FORMULAS = st.recursive(
    st.sampled_from(["x", "y", "2", "3", r"\pi", "n"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: rf"\frac{{{p[0]}}}{{{p[1]}}}"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]} + {p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]})({p[1]})"),
        inner.map(lambda i: rf"\sqrt{{{i}}}"),
        inner.map(lambda i: f"({i})^2"),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(FORMULAS)
def test_a_formula_equals_itself_and_not_the_next(formula: str) -> None:
    tree = parse_formula(formula)
    assert equal(tree, parse_formula(f"1 + {formula} - 1"))
    assert equal(parse_formula(f"2({formula})"), parse_formula(f"({formula}) + {formula}"))
    assert not equal(tree, parse_formula(rf"{formula} + \frac{{1}}{{10^{{40}}}}"))


@pytest.mark.parametrize(
    "text", ["2 3", "x2", "1/2x", "x^2^3", "5!!", r"\sin x (y)", r"\foo", "", "(", "5)", "^2", "a="]
)
def test_ambiguous_formulas_are_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_formula(text)
