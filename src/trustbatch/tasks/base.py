"""What a task is: an endless, seeded stream of prompts, and a grader."""

from typing import Protocol

from trustbatch.types import Prompt


class Task(Protocol):
    """Implement these three members and pass the object to `trustbatch.train(task=...)`."""

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
