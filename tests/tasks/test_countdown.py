import gzip
import json
import time

import pytest
from tests.support.shared_data import shared_data

from trustbatch.tasks.countdown import grade_countdown

NUMBERS, TARGET = [18, 45, 29], 34  # 45 - 29 + 18


@pytest.mark.parametrize(
    "completion",
    [
        "45 - 29 + 18",
        "45-29+18 = 34",
        "34 = 45-29+18",
        r"\boxed{45 - 29 + 18}",
        r"\boxed{45 - 29 + 18 = 34}",
        "I try.\n<answer>(45 - 29) + 18</answer>",
        "<think>18+45</think>\n<answer> 18 - (29 - 45) </answer>",
        "let me see\n\n18 + 45 \u2212 29.",
        r"$\left(45 - 29\right) + 18$",
        "-29 + 45 + 18",
        "[45 - 29] + 18",
    ],
)
def test_accepted_ways_to_write_an_expression(completion: str) -> None:
    assert grade_countdown(completion, NUMBERS, TARGET) == 1.0


def test_thinking_that_the_prompt_has_opened_must_end() -> None:
    assert grade_countdown(r"\boxed{45 - 29 + 18}", NUMBERS, TARGET, thinking=True) == 0.0
    assert grade_countdown("hm</think>45 - 29 + 18", NUMBERS, TARGET, thinking=True) == 1.0


@pytest.mark.parametrize(
    ("completion", "numbers", "target"),
    [
        (r"\frac{32 \times 50}{40}", [32, 50, 40], 40),
        (r"32 \cdot 50 \div 40", [32, 50, 40], 40),
        ("32 \u00d7 50 \u00f7 40", [32, 50, 40], 40),
        ("(7 + 5) / (1 / 2)", [7, 5, 1, 2], 24),
        ("8 / (3 - 8 / 3)", [8, 3, 8, 3], 24),
        (r"\dfrac{8}{3 - \frac{8}{3}}", [8, 3, 8, 3], 24),
    ],
)
def test_exact_fractions(completion: str, numbers: list[int], target: int) -> None:
    assert grade_countdown(completion, numbers, target) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "34",
        "= 34",
        "45 - 29",
        "45 - 29 + 18 + 0",
        "45 - 29 + 18 - 18 + 18",
        "45 + 29 + 18",
        "45 - 29 + 18 = 35",
        "45 - 29 = 16 + 18 = 34",
        "45 - 29 + 1 8",
        "4 5 - 29 + 18",
        "45 - 29 + 18 = 34 = 0",
        "35 = 45 - 29 + 18",
        "45 - 29 + 18.0",
        "45 - 29 + 18e0",
        "45 - 29 + (18",
        "45 - 29 + 18)",
        "45 - 29 + - - 18",
        "(45)(29)(18)",
        "45 ** 29 ** 18",
        "45^29^18",
        "45 // 29 + 18",
        "18 / (45 - 45) + 29",
        "18 / 0",
        "__import__('os').system('true')",
        "<answer>45 - 29 + 18",
        r"\boxed{45 - 29 + 18",
        "<think>45 - 29 + 18",
        "45 - 29 + 18</think> no",
        "the answer is 45 - 29 + 18, surely",
        "٤٥ - 29 + 18",
        "0x2d - 29 + 18",
        "4" * 100_000,
        "(" * 100_000,
        "(" * 400 + "45 - 29 + 18" + ")" * 400,
        "-" * 900 + "45",
        r"\frac" * 300,
        r"\frac{45}",
    ],
)
def test_wrong_or_no_expressions(completion: str) -> None:
    start = time.perf_counter()
    assert grade_countdown(completion, NUMBERS, TARGET) == 0.0
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("name", ["countdown_train", "countdown_test"])
def test_real_answers_are_right(name: str) -> None:
    with gzip.open(shared_data(f"{name}.jsonl.gz"), "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    right = [grade_countdown(row["answer"], row["nums"], row["target"]) for row in rows]
    assert sum(right) >= 0.99 * len(rows)
    other = [grade_countdown(row["answer"], row["nums"], row["target"] + 1) for row in rows]
    missing = [grade_countdown(row["answer"], row["nums"][1:], row["target"]) for row in rows]
    assert sum(other) == sum(missing) == 0
