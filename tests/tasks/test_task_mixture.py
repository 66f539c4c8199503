"""Mixtures of tasks: exact shares, everywhere."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from tests.support.own_task import Short
from tests.support.shared_data import shared_data
from tests.tasks.test_named_tasks import rows_file

import trustbatch
from trustbatch.models.policy import Policy
from trustbatch.rewards import Scorer
from trustbatch.rollout.collect import collect
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.tasks import Curriculum, Mixture, build_task
from trustbatch.tasks.base import is_environment
from trustbatch.tasks.mixture import even_order
from trustbatch.types import Prompt, Role, SamplingParams, Turn

OWN = Path(__file__).parents[1] / "support" / "own_task.py"


@pytest.mark.parametrize("seed", range(40))
def test_no_part_is_ever_a_whole_prompt_away_from_its_share(seed: int) -> None:
    rng = random.Random(seed)
    weights = [rng.randint(1, rng.choice([3, 30])) for _ in range(rng.randint(1, 7))]
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    order = even_order(shares) * 2
    turns = [0] * len(shares)
    for number, chosen in enumerate(order, start=1):
        turns[chosen] += 1
        for share, had in zip(shares, turns, strict=True):
            assert abs(number * share - had) < 1
    # so that in every window there are at most two more or fewer than the share
    for part, share in enumerate(shares):
        assert turns[part] == share * len(order)


def mixture(parts: list[dict[str, Any]], seed: int = 0) -> Mixture:
    task = build_task("mixture", seed=seed, parts=parts)
    assert isinstance(task, Mixture)
    return task


def test_each_part_goes_through_its_own_prompts(tmp_path: Path) -> None:
    path = rows_file(tmp_path, [{"problem": str(n), "answer": n} for n in range(10)])
    parts = [
        {"name": "file", "path": path, "label": "a", "weight": 0.7, "template": "a{problem}"},
        {"name": "arithmetic", "level": 1, "weight": 0.3},
    ]
    task = mixture(parts)
    prompts = [task.prompt(index) for index in range(1000)]
    assert len({prompt.id for prompt in prompts}) == 1000
    own = build_task("file", seed=0, path=path, template="a{problem}")
    texts = [prompt.text for prompt in prompts if prompt.task == "a"]
    assert texts == [own.prompt(index).text for index in range(700)]
    sums = build_task("arithmetic", seed=0, level=1)
    texts = [prompt.text for prompt in prompts if prompt.task == "arithmetic"]
    assert texts == [sums.prompt(index).text for index in range(300)]
    assert [mixture(parts).prompt(i) for i in (999, 5, 0)] == [prompts[i] for i in (999, 5, 0)]
    for prompt in prompts[:20]:
        assert task.grade(prompt, prompt.answer) == 1.0
        assert task.grade(prompt, f"{prompt.answer} or not 77") == 0.0
    assert task.describe() == "70.0% a = file: 10 problems | 30.0% arithmetic"
    fewer = task.without(["3"], "there")
    assert "a = file: 9 problems; left out: 1 also in there" in fewer.describe()


def test_real_data_in_any_window() -> None:
    task = mixture(
        [
            {"name": "gsm8k", "path": str(shared_data("gsm8k_train.jsonl.gz")), "weight": 5},
            {"name": "countdown", "path": str(shared_data("countdown_train.jsonl.gz"))},
        ]
    )
    names = [task.prompt(index).task for index in range(600)]
    for start in range(0, 590):
        assert abs(names[start : start + 12].count("countdown") - 2) <= 1
    assert task.prompt(names.index("countdown")).details["target"] > 0


def test_parts_with_the_same_problems_have_different_ids(tmp_path: Path) -> None:
    """Equal ids would get the same random numbers."""
    part = {"name": "file", "path": rows_file(tmp_path, [{"problem": "1", "answer": "1"}])}
    task = mixture([part | {"label": "a"}, part | {"label": "b"}])
    assert [task.prompt(index).id for index in range(4)] == ["a:0#0", "b:0#0", "a:0#1", "b:0#1"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], r"needs \[\[task.parts\]\]"),
        ([{"name": "mixture"}], "must be the name of a task"),
        ([{"weight": 1}], "must be the name of a task"),
        ([{"name": "arithmetic"}] * 2, "give each its own label"),
        ([{"name": "arithmetic", "weight": 0}], "must be above 0"),
        ([{"name": "arithmetic", "levle": 0}], "did you mean 'level'"),
        (
            [{"name": "arithmetic", "weight": 0.1234567}, {"name": "arithmetic", "label": "b"}],
            "fewer digits",
        ),
    ],
)
def test_wrong_parts_are_refused(parts: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mixture(parts)


def test_a_run_reports_the_reward_of_each_task(tiny_folder: Path, tmp_path: Path) -> None:
    result = trustbatch.train(
        model=tiny_folder,
        task={
            "name": "mixture",
            "parts": [
                {"name": "arithmetic", "level": 1, "weight": 1},
                {"name": f"{OWN}:Short", "label": "short", "weight": 3},
            ],
        },
        rollout={"prompts_per_step": 8, "samples_per_prompt": 2, "max_tokens": 4},
        training={"steps": 2},
        run={"folder": str(tmp_path)},
    )
    for line in result.metrics:
        assert (line["task/arithmetic/share"], line["task/short/share"]) == (0.25, 0.75)
        mean = 0.25 * line["task/arithmetic/reward"] + 0.75 * line["task/short/reward"]
        assert line["reward/mean"] == pytest.approx(mean)


def test_environments_in_a_mixture_are_played(policy: Policy) -> None:
    """With their own prompts, together with parts that do not reply."""
    parts = [{"name": f"{OWN}:{kind}", "label": kind.lower()} for kind in ("Talk", "Plain")]
    mixture = build_task("mixture", seed=0, parts=parts)
    groups = collect(
        NativeEngine(policy, seed=0),
        policy,
        [mixture.prompt(index) for index in range(4)],
        task=mixture,
        num_samples=3,
        sampling=SamplingParams(max_tokens=100, stop_token_ids=policy.stop_token_ids),
        max_turns=3,
    )
    for group in groups:
        lengths = {len(completion.turns) for completion in group.completions}
        assert lengths == {1} if group.prompt.task == "plain" else max(lengths) > 1
    graded = Scorer(mixture).score(groups)
    for group in graded:
        for completion, grade in zip(group.completions, group.grades, strict=True):
            assert grade.reward == float(len(completion.text) % 2)
    silent = build_task("mixture", seed=0, parts=parts[1:])
    assert not is_environment(silent)
    assert is_environment(build_task("mixture", seed=0, parts=[{"name": "calculator"}]))


def test_an_environment_with_a_curriculum_is_played() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Asked(Short):
        def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
            return f"{prompt.answer}?"

        def grade_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
            return float(len(turns))

    turns = (Turn(role=Role.POLICY, text="1"),) * 3
    curriculum = Curriculum(task=Asked())
    prompt = curriculum.prompt(0)
    assert is_environment(curriculum)
    assert curriculum.reply(prompt, turns) == f"{prompt.answer}?"
    assert curriculum.grade_turns(prompt, turns) == 3.0
    plain = Curriculum(task=Short())
    assert not is_environment(plain)
    assert plain.reply(prompt, turns) is None
    assert plain.grade_turns(prompt, turns) == plain.grade(prompt, "1")
