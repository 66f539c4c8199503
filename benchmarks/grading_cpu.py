"""Completions per second of the graders, in a pool of processes.

    python benchmarks/grading_cpu.py [--completions 2000] [--workers 2]

Short completions with answers as in mathematical training data: whole numbers, fractions, roots,
tuples and formulas, half of them wrong. The pool is started before the clock.
"""

import argparse
import os
import random
import time
from collections.abc import Callable

from trustbatch.rewards.pool import GraderPool
from trustbatch.rewards.terms import MathTerm, PooledTerms, Sample
from trustbatch.types import GradeStatus, Prompt


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


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    grade = PooledTerms((("math", MathTerm()),))
    print(f"{options.completions} completions, {options.workers} workers on {os.cpu_count()} cores")
    for name, kind in (("whole numbers", whole_number), ("answers of all kinds", mixed)):
        pool = GraderPool(grade, workers=options.workers, time_limit=10.0, memory_limit_gib=2.0)
        pool.run(samples_of(kind, options.workers))
        samples = samples_of(kind, options.completions)
        start = time.perf_counter()
        outcomes = pool.run(samples)
        seconds = time.perf_counter() - start
        pool.close()
        assert all(outcome.status is GradeStatus.GRADED for outcome in outcomes)
        right = sum(outcome.value["math"] for outcome in outcomes) / len(outcomes)
        print(f"{name:22} {len(samples) / seconds:8.0f} completions/s   {right:.0%} right")


if __name__ == "__main__":
    main()
