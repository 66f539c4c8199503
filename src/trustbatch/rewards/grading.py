"""How a task is asked for the reward of one completion."""

from collections.abc import Sequence

from trustbatch.tasks.base import GradesTurns, Task
from trustbatch.types import Prompt, Role, Turn


def grade_completion(task: Task, prompt: Prompt, text: str, turns: Sequence[Turn]) -> float:
    """Return the reward of a completion by its turns, where the task looks at them.

    `text` is the policy's last turn, and `turns` is empty where nobody answered.
    """
    if isinstance(task, GradesTurns):
        return task.grade_turns(prompt, turns or (Turn(role=Role.POLICY, text=text),))
    return task.grade(prompt, text)
