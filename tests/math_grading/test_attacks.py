"""Completions that try to get a reward for a wrong answer, or to hang the grader, get none."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.reliability import Record

from trustbatch.rewards.terms import MathTerm, PooledTerms, Sample
from trustbatch.types import GradeStatus, Prompt
from trustbatch.utils.worker_pool import WorkerPool

ATTACKS = Path(__file__).parents[1] / "data" / "grader_attacks.jsonl"
TIME_LIMIT = 10.0
"""the default of reward.time_limit"""
WORKERS = 2


def attacks() -> list[dict[str, Any]]:
    """The table; a long completion is stored as beginning, repeated text, number and end."""
    rows = [json.loads(line) for line in ATTACKS.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if isinstance(row["completion"], list):
            before, repeated, times, after = row["completion"]
            row["completion"] = before + repeated * times + after
    return rows


def test_no_attack_is_rewarded_and_none_outlasts_the_deadline(reliability: Record) -> None:
    table = attacks()
    assert len({(row["completion"], row["answer"]) for row in table}) >= 140
    grade = PooledTerms((("math", MathTerm()),))
    pool = WorkerPool(grade, workers=WORKERS, time_limit=TIME_LIMIT, memory_limit_gib=2.0)
    pool.prepare()
    samples = [
        Sample(
            prompt=Prompt(id=str(number), text="", answer=row["answer"]),
            completion=row["completion"],
            num_tokens=1,
        )
        for number, row in enumerate(table)
    ]
    start = time.monotonic()
    outcomes = pool.run(samples)
    seconds = time.monotonic() - start
    pool.close()
    zero, left_out, rewarded = [], [], []
    for row, outcome in zip(table, outcomes, strict=True):
        if outcome.status is not GradeStatus.GRADED:
            left_out.append((row["kind"], row["completion"][:80], outcome.reason))
        else:
            (zero if outcome.value["math"] == 0.0 else rewarded).append(row["completion"][:80])
    assert rewarded == []
    assert left_out == []
    assert seconds < TIME_LIMIT * len(table) / WORKERS / 4
    kinds = Counter(row["kind"].replace(" ", "_") for row in table)
    reliability.add("grader", attacks=len(table), reward_zero=len(zero), **kinds)
