"""What a task is: an endless, seeded stream of prompts, and a grader."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from trustbatch.types import Prompt, RolloutGroup


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


@runtime_checkable
class FilteredTask(Protocol):
    """A task that leaves some of its problems out, and says how many."""

    def statements(self) -> Collection[str]:
        """Return the problems as they are in the data, without the words around them."""
        ...

    def without(self, statements: Collection[str], where: str) -> Self:
        """Return the task without problems that are also `where`; all by `words_of`."""
        ...

    def fitted(self, num_tokens: Callable[[Prompt], int], say: Callable[[str], None]) -> Self:
        """Return the task without prompts that have more tokens than it allows."""
        ...

    def describe(self) -> str:
        """Say in one line how many problems there are, and how many were left out and why."""
        ...


@runtime_checkable
class LearningTask(Protocol):
    """A task whose prompts depend on what became of earlier ones.

    `prompt` is then a pure function of the index and of the state.
    """

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Take note of graded groups; called once for each, in the order of sampling."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what was learnt, in plain values as in JSON; saved with each checkpoint."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        ...
