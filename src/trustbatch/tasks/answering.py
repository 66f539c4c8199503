"""Tasks that may be environments, asked without knowing: for tasks that are made of others.

By members and not by the protocols of `trustbatch.tasks.environments`, which are made of tasks.
"""

from collections.abc import Sequence
from typing import Any

from trustbatch.types import Prompt, Turn


def answers(task: Any) -> bool:
    """Whether a task is an environment; one made of others says itself whether one of them is."""
    return hasattr(task, "reply") and bool(getattr(task, "answers", True))


def reply_of(task: Any, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
    """Return a task's reply; None where it is no environment."""
    return task.reply(prompt, turns) if answers(task) else None


def grade_of(task: Any, prompt: Prompt, turns: Sequence[Turn]) -> float:
    """Return the reward of an episode, by all its turns where the task looks at them."""
    if hasattr(task, "grade_turns"):
        return task.grade_turns(prompt, turns)
    return task.grade(prompt, turns[-1].text)
