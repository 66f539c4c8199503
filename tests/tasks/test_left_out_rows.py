"""Rows that are left out by their ids: another row takes the seat, and all others stay."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.support.own_task import Short
from tests.tasks.test_named_tasks import rows_file

from trustbatch.tasks import build_task
from trustbatch.tasks.benchmarks import FileTask
from trustbatch.tasks.rows import PromptChecks, or_leave_out
from trustbatch.types import Grade, Prompt, RolloutGroup

NUM_ROWS, NUM_PROMPTS = 7, 40


@pytest.fixture
def path(tmp_path: Path) -> str:
    rows = [{"id": f"r{n}", "problem": f"{n}+1=", "answer": n + 1} for n in range(NUM_ROWS)]
    return rows_file(tmp_path, rows)


def prompts_of(task: Any) -> list[Prompt]:
    return [task.prompt(index) for index in range(NUM_PROMPTS)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_another_row_takes_the_seat_and_all_others_stay(path: str, shuffle: bool) -> None:
    every = prompts_of(FileTask(path=path, shuffle=shuffle))
    task = FileTask(path=path, shuffle=shuffle, leave_out=("r2",))
    rest = prompts_of(task)
    seats = [index for index, prompt in enumerate(every) if prompt.id.startswith("r2#")]
    assert len(seats) in (5, 6)  # 40 prompts of 7 rows
    for index, (before, after) in enumerate(zip(every, rest, strict=True)):
        if index in seats:
            assert after.text != "2+1="
            # distinct from the id that the row has at its own place in the epoch
            assert after.id.endswith(f"#{index // NUM_ROWS}.2")
        else:
            assert after == before
    assert len({prompt.id for prompt in rest}) == NUM_PROMPTS
    assert len({rest[index].text for index in seats}) > 1  # not always the same one
    assert len(task.problems) == 6
    assert task.describe() == "file: 6 problems; left out: 1 named in task.leave_out"

    fewer = prompts_of(FileTask(path=path, shuffle=shuffle, leave_out=("r2", "r5")))
    for before, after in zip(rest, fewer, strict=True):
        assert (after == before) == (not before.id.startswith("r5#"))


def test_filters_see_a_row_that_is_left_out(path: str, tmp_path: Path) -> None:
    """So the seats are those of a run that began with the row."""
    options: dict[str, Any] = {"path": path, "max_prompt_tokens": 3}
    checks = PromptChecks(
        count_tokens=lambda prompts: [
            4 if prompt.id == "r1" else "fails" if prompt.id == "r2" else 3 for prompt in prompts
        ],
        context_length=10,
    )
    with pytest.raises(ValueError, match=r"Line 3 of .* fails: "):
        FileTask(**options).fitted(checks)
    task = FileTask(**options, leave_out=("r1", "r2")).fitted(checks)
    assert [seat.id for seat in task.seats] == ["r0", "r2", "r3", "r4", "r5", "r6"]
    assert [problem.id for problem in task.problems] == ["r0", "r3", "r4", "r5", "r6"]
    rest = task.without(["2+1=", "3+1="], "a test")
    assert [seat.id for seat in rest.seats] == ["r0", "r4", "r5", "r6"]


def test_a_bad_row_that_is_named_is_left_out(tmp_path: Path) -> None:
    rows = [{"problem": "1=", "answer": None}, {"id": "b", "problem": "2=", "answer": 2}]
    path = rows_file(tmp_path, rows)
    task = FileTask(path=path, leave_out=("0",))
    assert [problem.id for problem in task.problems] == ["b"]
    assert task.describe() == "file: 1 problems; left out: 1 named in task.leave_out"
    with pytest.raises(ValueError, match=r"task.leave_out has 'B', which is the id of no row of"):
        FileTask(path=path, leave_out=("0", "B"))
    with pytest.raises(ValueError, match=r"leave nothing"):
        FileTask(path=path, leave_out=("0", "b"))
    with pytest.raises(ValueError, match=r"task.leave_out must be a list: write \['b'\]"):
        build_task("file", seed=0, path=path, leave_out="b")
    with pytest.raises(ValueError, match=r"task.bad_rows = 'skip' must be 'stop' or 'leave_out'"):
        FileTask(path=path, bad_rows="skip")


def test_the_row_of_a_prompt_is_found_in_a_mixture_and_a_curriculum(path: str) -> None:
    part = {"name": "file", "path": path, "leave_out": ["r2"]}
    mixture = build_task("mixture", seed=0, parts=[{"name": "arithmetic"}, part])
    hints = {or_leave_out(mixture, prompt) for prompt in prompts_of(mixture)}
    assert "" in hints  # an endless part has no rows
    assert (
        f", or leave out line 1 of '{path}' with " + ('task.parts.1.leave_out = ["r2", "r0"]')
        in hints
    )
    assert len(hints) == 1 + NUM_ROWS - 1

    curriculum = build_task("file", seed=0, path=path, curriculum={})
    assert or_leave_out(curriculum, curriculum.problems[3]) == (  # type: ignore[attr-defined]
        f", or leave out line 4 of '{path}' with task.leave_out = [\"r3\"]"
    )
    own = Short()
    assert "row 1 of 'short'" in or_leave_out(own, own.problems[0])
    assert or_leave_out(own, Prompt(id="unknown", text="", answer="")) == ""
    assert pickle.loads(pickle.dumps(own)).grade(own.problems[0], "") == 1.0


def test_a_curriculum_keeps_the_order_of_the_other_rows(path: str) -> None:
    every = build_task("file", seed=0, path=path, curriculum={})
    rest = build_task("file", seed=0, path=path, curriculum={}, leave_out=["r2"])
    for _ in range(5):
        before = [every.prompt(every.num_observed + n).text for n in range(NUM_ROWS)]  # type: ignore[attr-defined]
        after = [rest.prompt(rest.num_observed + n).text for n in range(NUM_ROWS - 1)]  # type: ignore[attr-defined]
        assert [text for text in before if text != "2+1="] == after
        group = RolloutGroup(
            prompt=Prompt(id="r1#0", text="", answer=""),
            prompt_token_ids=(),
            completions=(),
            grades=(Grade(reward=1.0), Grade(reward=0.0)),
        )
        for task in (every, rest):
            task.observe([group])  # type: ignore[attr-defined]
