"""A curriculum favors problems that can be learned, and a resumed run samples the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints.test_resume import comparable
from tests.support.train_sequences import make_completion
from tests.tasks.test_named_tasks import rows_file

import trustbatch
from trustbatch.tasks import Curriculum, build_task
from trustbatch.types import Grade, Prompt, RolloutGroup

OWN = Path(__file__).parents[1] / "support" / "own_task.py"


def curriculum(tmp_path: Path, num_problems: int = 30, **options: Any) -> Curriculum:
    rows = [{"id": f"r{n}", "problem": str(n), "answer": n} for n in range(num_problems)]
    task = build_task("file", seed=1, path=rows_file(tmp_path, rows), curriculum=options)
    assert isinstance(task, Curriculum)
    return task


def graded(prompt: Prompt, rewards: list[float]) -> RolloutGroup:
    return RolloutGroup(
        prompt=prompt,
        prompt_token_ids=(1,),
        completions=tuple(make_completion([1], sample=n) for n in range(len(rewards))),
        grades=tuple(Grade(reward=reward) for reward in rewards),
    )


def test_problems_in_the_band_and_new_ones_are_sampled_more_often(tmp_path: Path) -> None:
    """Ten always pass, ten sometimes, ten never."""
    task = curriculum(tmp_path, low=0.2, high=0.8, weight=5)
    sampled = []
    for step in range(400):
        prompts = [task.prompt(4 * step + i) for i in range(4)]
        assert len({prompt.answer for prompt in prompts}) == 4
        task.observe(
            [graded(p, [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]][int(p.answer) % 3]) for p in prompts]
        )
        sampled += [int(prompt.answer) for prompt in prompts]
    assert len(set(sampled[:100])) == 30  # new ones come soon
    late = sampled[100:]
    in_band = sum(n % 3 == 1 for n in late) / 10
    outside = sum(n % 3 != 1 for n in late) / 20
    assert 3.5 < in_band / outside < 5.5  # less than 5: none comes twice in a batch


def test_a_pass_rate_follows_the_policy(tmp_path: Path) -> None:
    task = curriculum(tmp_path, num_problems=1, memory=0.5)
    for rewards, counts in [
        ([0.0, 0.0], [2.0, 0.0]),
        ([1.0, 0.4], [3.0, 1.0]),
        ([1.0, float("nan")], [2.5, 1.5]),
        ([float("nan")] * 2, [2.5, 1.5]),
    ]:
        task.observe([graded(task.prompt(task.num_observed), rewards)])
        assert task.counts["r0"] == counts
    assert task.num_observed == 4


def test_the_state_is_plain_and_complete(tmp_path: Path) -> None:
    task, other = curriculum(tmp_path), curriculum(tmp_path)
    task.observe([graded(task.prompt(index), [1.0, 1.0]) for index in range(7)])
    fresh = [other.prompt(index).answer for index in range(7, 30)]
    other.load_state(json.loads(json.dumps(task.state())))
    again = [other.prompt(index).answer for index in range(7, 30)]
    assert again == [task.prompt(index).answer for index in range(7, 30)]
    assert again != fresh
    assert len({task.prompt(index).id for index in range(7, 100)}) == 93


def test_filters_reach_the_problems(tmp_path: Path) -> None:
    task = curriculum(tmp_path).without(["3"], "there")
    assert len(task.problems) == 29
    assert task.describe() == (
        "file: 29 problems; left out: 1 also in there; pass rates from 0.1 to 0.9 are 4 times as "
        "likely"
    )
    assert {task.prompt(index).answer for index in range(29)} == {
        str(n) for n in range(30) if n != 3
    }


def test_a_run_does_not_change_the_object_that_it_was_given(
    tiny_folder: Path, tmp_path: Path
) -> None:
    rows = [{"problem": f"{n}+1=", "answer": n + 1} for n in range(9)]
    task = build_task("file", seed=0, path=rows_file(tmp_path, rows), curriculum={})
    runs = [small_run(tiny_folder, tmp_path / name, task) for name in ("first", "second")]
    assert comparable(runs[0].folder) == comparable(runs[1].folder)
    assert task.state() == {"num_observed": 0, "counts": {}}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"low": 0.5, "high": 0.4}, "0 <= low <= high <= 1"),
        ({"weight": 0.5}, "at least 1"),
        ({"memory": 2}, "from 0 to 1"),
        ({"lwo": 2}, "did you mean 'low'"),
    ],
)
def test_wrong_curricula_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        curriculum(tmp_path, **options)
    with pytest.raises(ValueError, match="requires a finite task"):
        build_task("arithmetic", seed=0, curriculum={})
    with pytest.raises(ValueError, match="is a table"):
        build_task("arithmetic", seed=0, curriculum=True)


LEARNING = {
    "alone": {"name": f"{OWN}:Short", "curriculum": {"low": 0.3, "high": 0.7, "weight": 20}},
    "mixed": {
        "name": "mixture",
        "parts": [
            {"name": f"{OWN}:Short", "label": "short", "weight": 2, "curriculum": {"weight": 20}},
            {"name": "arithmetic", "level": 1},
        ],
    },
}


def small_run(model: Path, folder: Path, task: Any, **rollout: Any) -> trustbatch.RunResult:
    return trustbatch.train(
        model=model,
        task=task,
        rollout={"prompts_per_step": 3, "samples_per_prompt": 4, "max_tokens": 6, **rollout},
        training={"steps": 6, "learning_rate": 1e-3},
        run={"name": "run", "folder": str(folder), "checkpoint_every": 2, "keep_checkpoints": 3},
    )


@pytest.mark.parametrize("rollout", [{}, {"lag": 2}, {"dynamic_sampling": True, "lag": 1}])
@pytest.mark.parametrize("task", LEARNING)
def test_a_resumed_run_equals_an_uninterrupted_one(
    task: str, rollout: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """From every checkpoint; `test_resume.py` kills runs at any moment."""
    whole = small_run(tiny_folder, tmp_path / "whole", LEARNING[task], **rollout)
    expected = comparable(whole.folder)
    weights = load_file(whole.checkpoint / "model.safetensors")
    for last in (2, 4):
        folder = tmp_path / f"from-{last}"
        shutil.copytree(whole.folder.parent, folder)
        for step in range(last + 2, 7, 2):
            shutil.rmtree(folder / "run" / "checkpoints" / f"step-{step}")
        again = small_run(tiny_folder, folder, LEARNING[task], **rollout)
        assert comparable(again.folder) == expected
        for name, tensor in load_file(again.checkpoint / "model.safetensors").items():
            assert torch.equal(tensor, weights[name])
        states = [run.checkpoint / "trainer" / "state.json" for run in (whole, again)]
        assert states[0].read_text() == states[1].read_text()
    state = json.loads(states[0].read_text())["task"]
    assert (state["short"] if task == "mixed" else state)["counts"]
