"""The grader of math: completions per second, and what it accepts beside math-verify.

    python benchmarks/grading_cpu.py [--completions 2000] [--workers 2] [--answers 4000] [--seed 0]

Speed: short completions with answers as in mathematical training data (whole numbers, fractions,
roots, tuples and formulas, half of them wrong), in a pool that is started before the clock.
Comparison: rewrites and near misses of real answers (`grading_pairs`), graded by both.
"""

import argparse
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from grading_pairs import build_pairs, real_answers
from math_verify import parse, verify

from trustbatch.math_grading.grade import grade_math
from trustbatch.rewards.terms import MathTerm, PooledTerms, Sample
from trustbatch.types import GradeStatus, Prompt
from trustbatch.utils.worker_pool import WorkerPool

DATA = Path(__file__).parents[2] / "shared" / "data"
FILES = (
    "math500", "aime24", "aime25", "aime26", "amc23", "amo_bench_p", "deepscaler_preview_31k",
    "gsm8k_test",
)  # fmt: skip


def whole_number(rng: random.Random) -> tuple[str, str]:
    """An answer such as 204, given as a whole number."""
    number = rng.randrange(1000)
    return str(number), str(number + rng.randrange(2))


def mixed(rng: random.Random) -> tuple[str, str]:
    """Answers of all kinds, given in another form."""
    a, b = rng.randrange(2, 40), rng.randrange(2, 40)
    wrong = rng.randrange(2)
    return rng.choice(
        [
            (str(a), str(a + wrong)),
            (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{2 * a}}}{{{2 * b + wrong}}}"),
            (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + wrong}}}"),
            (rf"({a}, {b})", rf"({a}.0, {b + wrong})"),
            (rf"(x+{a})(x-{b})", rf"x^2 + {a - b}x - {a * b + wrong}"),
            (rf"\frac{{{a}\pi}}{{{b}}}", rf"{a + wrong}\pi/{b}"),
        ]
    )


def samples_of(kind: Callable[[random.Random], tuple[str, str]], count: int) -> list[Sample]:
    """Completions of a few lines, the answer in a box."""
    rng = random.Random(0)
    thought = "First we write down what is given, and then we look at what follows from it. " * 8
    found = []
    for number in range(count):
        answer, given = kind(rng)
        prompt = Prompt(id=str(number), text="What is it?", answer=answer)
        text = f"{thought}\nSo the answer is $\\boxed{{{given}}}$."
        found.append(Sample(prompt=prompt, completion=text, num_tokens=200))
    return found


def measure_pool(num_completions: int, num_workers: int) -> None:
    """Print how many completions a pool of processes grades in a second."""
    grade = PooledTerms((("math", MathTerm()),))
    print(f"{num_completions} completions, {num_workers} workers on {os.cpu_count()} cores")
    for name, kind in (("whole numbers", whole_number), ("answers of all kinds", mixed)):
        pool = WorkerPool(grade, workers=num_workers, time_limit=10.0, memory_limit_gib=2.0)
        pool.run(samples_of(kind, num_workers))
        samples = samples_of(kind, num_completions)
        start = time.perf_counter()
        outcomes = pool.run(samples)
        seconds = time.perf_counter() - start
        pool.close()
        assert all(outcome.status is GradeStatus.GRADED for outcome in outcomes)
        right = sum(outcome.value["math"] for outcome in outcomes) / len(outcomes)
        print(f"{name:22} {len(samples) / seconds:8.0f} completions/s   {right:.0%} right")


def by_math_verify(completion: str, answer: str) -> float:
    """Grade as math-verify's documentation does, with its own defaults."""
    return float(verify(parse(f"${answer}$"), parse(completion)))


def compare(folder: Path, num_answers: int, seed: int) -> None:
    """Print how both graders judge the same rewrites and near misses, and their speed."""
    rng = random.Random(seed)
    answers = real_answers(folder, FILES)
    pairs = build_pairs(rng.sample(answers, min(num_answers, len(answers))), rng)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    graders = {"trustbatch": grade_math, "math-verify": by_math_verify}
    print(f"\n{len(answers)} distinct answers, {num_answers} of them, seed {seed}; one process")
    heads = ("rewrites", "accepted", "near misses", "accepted", "pairs/s")
    print(" " * 12, *(f"{head:>{max(len(head), 9)}}" for head in heads))
    speeds = {}
    for name, grade in graders.items():
        grade(r"$\boxed{\frac{\sqrt{8}}{2}}$", r"\sqrt{2}")  # imports are not counted
        start = time.perf_counter()
        rewards = [grade(f"So it is $\\boxed{{{pair.given}}}$.", pair.answer) for pair in pairs]
        speeds[name] = len(pairs) / (time.perf_counter() - start)
        shown = [f"{name:12}"]
        for is_equal, width in ((True, 9), (False, 11)):
            group = [r for r, pair in zip(rewards, pairs, strict=True) if pair.is_equal is is_equal]
            shown += [f"{len(group):{width}}", f"{sum(group) / len(group):9.2%}"]
        print(*shown, f"{speeds[name]:9.0f}", flush=True)
    print(f"trustbatch is {speeds['trustbatch'] / speeds['math-verify']:.0f} times as fast")


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the real answers")
    parser.add_argument("--answers", type=int, default=4000, help="how many of them")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    measure_pool(options.completions, options.workers)
    if options.data.is_dir():
        compare(options.data, options.answers, options.seed)
    else:
        print(f"No comparison with math-verify: {options.data} is not there (--data).")


if __name__ == "__main__":
    main()
