"""What a task is: an endless, seeded stream of prompts, and a grader."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from trustbatch.types import Prompt


class Task(Protocol):
    """Implement these three members and pass the object to `trustbatch.train(task=...)`.

    The grader runs in other processes with limits of time and memory, so a class in a module of
    its own is best. One whose `grades_in_process` is True says that it is quick and safe, and is
    graded in this process.
    """

    @property
    def name(self) -> str:
        """Short name for logs."""
        ...

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt; a pure function, so that a resumed run sees the same ones."""
        ...

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Return the reward of a completion's text."""
        ...


@runtime_checkable
class ProblemSet(Protocol):
    """A task with an end: all its problems can be evaluated, each once."""

    @property
    def problems(self) -> Sequence[Prompt]:
        """All of them, in the order of the data, each with an id of its own."""
        ...
