"""Groups with equal rewards are replaced by others, within a bound."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import forked
from tests.tasks.test_curriculum import graded
from tests.training.test_ranks import assert_same_run

from trustbatch.api import train_config
from trustbatch.build.session import build_session
from trustbatch.cli import main
from trustbatch.config import parse_config
from trustbatch.loops.generate import is_unequal
from trustbatch.loops.session import Session
from trustbatch.loops.sources import batch_generator
from trustbatch.observe.run_folder import read_metrics
from trustbatch.types import Prompt

OWN = Path(__file__).parents[1] / "support" / "own_task.py"


def tree(
    model: Path, folder: Path, *, lowest: int = 0, highest: int = 5, **rollout: Any
) -> dict[str, Any]:
    return {
        "model": {"name": str(model), "device": "cpu"},
        "task": {"name": f"{OWN}:Short", "lowest": lowest, "highest": highest},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_tokens": 6,
            "dynamic_sampling": True,
            **rollout,
        },
        "training": {"steps": 5, "learning_rate": 1e-4},
        "run": {"folder": str(folder)},
    }


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 0.0], False),
        ([0.0, 1.0], True),
        ([0.0, float("nan")], False),
        ([float("nan")] * 2, False),
        ([0.0, float("nan"), 0.5], True),
    ],
)
def test_unequal_are_grades_that_differ(rewards: list[float], expected: bool) -> None:
    assert is_unequal(graded(Prompt(id="", text="", answer=""), rewards)) == expected


def session_of(model: Path, folder: Path, **options: Any) -> Session:
    return build_session(parse_config(tree(model, folder, **options)))


def test_batches_have_unequal_groups_and_the_rest_waits(tiny_folder: Path, tmp_path: Path) -> None:
    session = session_of(tiny_folder, tmp_path)
    generator, cursor = batch_generator(session), session.state.cursor
    for _ in range(4):
        batch, after = generator.generate(session.engine, cursor)
        assert len(batch.groups) == 4
        assert all(is_unequal(group) for group in batch.groups)
        # what was left is trained on first
        assert tuple(batch.groups[: len(cursor.spare)]) == cursor.spare
        assert len(after.spare) < 4
        num_groups = after.num_prompts - cursor.num_prompts
        assert batch.metrics == {
            "dynamic/rounds": num_groups / 4,
            "dynamic/groups_sampled": num_groups,
            "dynamic/groups_kept": 4 - len(cursor.spare) + len(after.spare),
            "dynamic/groups_spare": len(after.spare),
            "dynamic/groups_missing": 0,
        }
        cursor = after
    assert cursor.num_prompts > 16
    session.close()


def test_a_step_goes_on_with_what_there_is(tiny_folder: Path, tmp_path: Path) -> None:
    """All answers are short enough: nothing differs, and the bound is two rounds."""
    session = session_of(tiny_folder, tmp_path, lowest=99, highest=99, max_sampling_rounds=2)
    cursor = session.state.cursor
    for _ in range(2):
        batch, cursor = batch_generator(session).generate(session.engine, cursor)
        assert len(batch.groups) == 4
        assert batch.metrics["dynamic/rounds"] == 2
        assert batch.metrics["dynamic/groups_kept"] == 0
        assert batch.metrics["dynamic/groups_missing"] == 4
    assert cursor.num_prompts == 16
    session.close()


def test_spare_groups_are_honest_about_their_age(tiny_folder: Path, tmp_path: Path) -> None:
    result = train_config(parse_config(tree(tiny_folder, tmp_path)))
    spares = [line["dynamic/groups_spare"] for line in result.metrics]
    assert sum(spares[:-1]) > 0
    for before, line in zip([0.0, *spares], result.metrics, strict=False):
        assert line["rollout/lag_mean"] == before / 4
        assert line["reward/equal_groups_fraction"] == 0.0
    stored = (result.checkpoint / "trainer" / "spare_rollouts.jsonl").read_text().splitlines()
    assert len(stored) == spares[-1]
    assert all(json.loads(line)["grades"] for line in stored)


def test_without_it_nothing_is_said(tiny_folder: Path, tmp_path: Path) -> None:
    config = parse_config(tree(tiny_folder, tmp_path, dynamic_sampling=False))
    lines = train_config(config).metrics
    assert not [key for line in lines for key in line if key.startswith("dynamic/")]
    assert max(line["reward/equal_groups_fraction"] for line in lines) > 0


CONFIG = """
[model]
name = {model!r}
device = "cpu"
[task]
name = {task!r}
curriculum = {{low = 0.3, high = 0.7}}
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_tokens = 6
dynamic_sampling = true
lag = 1
[training]
steps = 3
learning_rate = 1e-3
[run]
name = "run"
folder = {folder!r}
"""


@pytest.mark.slow
def test_two_ranks_sample_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        text = CONFIG.format(
            model=str(tiny_folder), task=f"{OWN}:Short", folder=str(tmp_path / name)
        )
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    assert main(["train", str(tmp_path / "one.toml")]) == 0
    forked.in_ranks(2, main, ["train", str(tmp_path / "two.toml")])
    expected = read_metrics(tmp_path / "one" / "run")
    assert_same_run(read_metrics(tmp_path / "two" / "run"), expected)
    states = [
        json.loads((tmp_path / n / "run/checkpoints/step-3/trainer/state.json").read_text())["task"]
        for n in ("one", "two")
    ]
    assert states[0] == states[1]
