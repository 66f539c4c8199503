"""Graders that return what is no reward, or misbehave: the completion is left out, no other is."""

import math
import time

import pytest
from test_scoring import group_of, scorer_of
from tests.support.hostile_rewards import HOSTILE, Hostile
from tests.support.reliability import Record

from trustbatch.types import GradeStatus


@pytest.mark.slow
def test_nothing_that_is_no_reward_becomes_one(reliability: Record) -> None:
    wrong = []
    with scorer_of(Hostile(), time_limit=2.0, memory_limit_gib=0.5) as scorer:
        for name in HOSTILE:
            start = time.monotonic()
            (group,) = scorer.score([group_of("ok", name, "ok")])
            before, grade, after = group.grades
            is_left_out = grade.status is not GradeStatus.GRADED and math.isnan(grade.reward)
            if not is_left_out or not grade.reason or len(grade.reason) > 600:
                wrong.append((name, grade))
            if before.reward != 1.0 or after.reward != 1.0 or time.monotonic() - start > 20.0:
                wrong.append((name, before, after))
    assert wrong == []
    reliability.add("rewards", hostile=len(HOSTILE), left_out=len(HOSTILE))
