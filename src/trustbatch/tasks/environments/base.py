"""What an environment is: a task that answers what the policy says."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from trustbatch.tasks.base import Task
from trustbatch.types import Prompt, Turn


@runtime_checkable
class Environment(Task, Protocol):
    """A task with one more member, `reply`; a task without it is over after the first turn.

    `grade` gets the text of the policy's last turn alone: nothing that the environment said can be
    taken for the policy's words. An environment that wants to see more has `grade_turns`.
    """

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """Answer the policy's last turn, or return None where the episode is over.

        A pure function of the conversation so far, without a state of its own: episodes are many
        at a time, and a resumed run plays some of them again. It runs in this process and all
        episodes wait for it, so keep it quick.
        """
        ...


@runtime_checkable
class GradesTurns(Protocol):
    """An environment whose reward depends on more than the policy's last turn."""

    def grade_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        """Return the reward of an episode: turns of policy and environment, a policy's last."""
        ...
