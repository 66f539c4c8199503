"""What a task is: an endless, seeded stream of prompts, and a grader.

`Task` is the required interface; the other protocols are optional capabilities. A task that
implements `Environment` replies to completions, and episodes have several turns.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeGuard, runtime_checkable

from trustbatch.errors import ConfigError
from trustbatch.tasks.rows import PromptChecks
from trustbatch.types import Grade, Prompt, Role, RolloutGroup, Turn

Reply = str | Sequence[Mapping[str, str]]
"""text, or chat messages such as {"role": "tool", "content": "42"}"""
HELD_OUT_SEED = 1_000_003
"""seed of endless tasks in evaluations, different from the usual seeds of training runs"""
EpisodeKey = tuple[str, int]
"""the id of the prompt, and the number of the sample"""


class Task(Protocol):
    """Implement these three members and pass the object to `trustbatch.train(task=...)`.

    Grading runs in other processes with time and memory limits, so define the class in a module of
    its own. Set `grades_in_process = True` on a class whose grader is fast and safe enough to run
    in the training process.
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
class Environment(Task, Protocol):
    """A task that replies to the policy; without `reply`, an episode is a single turn.

    `grade` gets only the text of the policy's last turn, so that the environment's own text is
    never graded. To grade the whole episode, implement `GradesTurns`.
    """

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> Reply | None:
        """Reply to the policy's last turn, or return None to end the episode.

        Must be a pure function of the conversation: many episodes run at a time, and a resumed run
        replays some of them. It runs in the training process while all episodes wait, so keep it
        fast.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """An episode in which the policy has just spoken."""

    key: EpisodeKey
    prompt: Prompt
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an environment makes of the policy's last turn."""

    reply: Reply | None = None
    """None ends the episode"""
    reward: float | None = None
    truncated: bool = False
    """whether the environment ended the episode before its own end, such as at a limit of turns"""
    failure: Grade | None = None
    """why the episode can't be played on"""


class StatefulEnvironment(Task, Protocol):
    """A task that keeps a live session per episode, instead of replying from the turns alone.

    A session begins with the first call for a key. Sessions live on rank 0.
    """

    @property
    def max_sessions(self) -> int:
        """How many episodes are played at a time."""
        ...

    def step_sessions(self, episodes: Sequence[Spoken]) -> list[Step]:
        """Pass the policy's last turns to the sessions, all at the same time."""
        ...

    def end_sessions(self, keys: Collection[EpisodeKey]) -> None:
        """End the sessions of episodes that are over, or given up."""
        ...


@runtime_checkable
class GradesTurns(Protocol):
    """An environment whose reward depends on more than the policy's last turn."""

    def grade_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        """Return the reward of an episode, whose last turn is the policy's."""
        ...


@runtime_checkable
class ProblemSet(Protocol):
    """A finite task: all its problems can be evaluated, each once."""

    @property
    def problems(self) -> Sequence[Prompt]:
        """All problems in the order of the data, each with a unique id."""
        ...


@runtime_checkable
class FilteredTask(Protocol):
    """A task that can leave out some of its problems, and reports how many."""

    def statements(self) -> Collection[str]:
        """Return the problems as they are in the data, without the template."""
        ...

    def without(self, statements: Collection[str], where: str) -> Self:
        """Return the task without these problems, compared by `normalized_words`.

        `where` says in messages where they come from.
        """
        ...

    def fitted(self, checks: PromptChecks) -> Self:
        """Return the task after a check of all prompts: without those that it does not allow."""
        ...

    def describe(self) -> str:
        """Return one line with the number of problems, and of those left out by reason."""
        ...


@runtime_checkable
class ReadsFiles(Protocol):
    """A task that reads files: a run that is resumed after one of them was edited is refused."""

    @property
    def files(self) -> Mapping[str, str]:
        """Paths of the files, by the names that a sentence calls them."""
        ...


@runtime_checkable
class ReadsDataSets(Protocol):
    """A task that reads rows which are no files here: they are compared in the same way."""

    @property
    def digests(self) -> Mapping[str, str]:
        """SHA-256 of the rows, by the names that a sentence calls them."""
        ...


@runtime_checkable
class LearningTask(Protocol):
    """A task whose prompts depend on the rewards of earlier ones, such as a curriculum.

    `prompt` is then a pure function of the index and the state.
    """

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Update the state from graded groups; called once per group, in sampling order."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON values; saved with each checkpoint."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        ...


def is_environment(task: Any) -> TypeGuard[Environment]:
    """Whether a task is an environment.

    A task made of others always has `reply`; its own `is_environment` says whether any of them
    replies.
    """
    replies = hasattr(task, "reply") and bool(getattr(task, "is_environment", True))
    return replies or is_stateful(task)


def is_stateful(task: Any) -> TypeGuard[StatefulEnvironment]:
    """Whether a task has live sessions; a task made of others says whether any of them has."""
    return hasattr(task, "step_sessions") and bool(getattr(task, "is_stateful", True))


def reply_to(task: Any, prompt: Prompt, turns: Sequence[Turn]) -> Reply | None:
    """Return a task's reply; None if it is not an environment."""
    return task.reply(prompt, turns) if is_environment(task) else None


def is_reply(value: Any) -> bool:
    """Whether a value is text, or a list of chat messages with text."""
    if isinstance(value, str):
        return True
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )


def close_task(task: Any) -> None:
    """End the processes of a task that has any."""
    getattr(task, "close", lambda: None)()


def grade_completion(
    task: Task, prompt: Prompt, completion: str, turns: Sequence[Turn] = ()
) -> float:
    """Return the reward of a completion: by its turns if the task grades turns.

    `completion` is the policy's last turn; `turns` is empty if there was no reply.
    """
    if isinstance(task, GradesTurns):
        return task.grade_turns(prompt, turns or (Turn(role=Role.POLICY, text=completion),))
    return task.grade(prompt, completion)


def check_task(task: Any) -> None:
    """Refuse an object that is not a task, before the run starts."""
    if inspect.isclass(task):
        raise ConfigError(f"{task.__name__} is a class, not a task: pass {task.__name__}(...).")
    kind = type(task).__name__
    if not isinstance(getattr(task, "name", None), str) or not task.name:
        raise ConfigError(f"The task {kind} has no name: give it a `name` of type str.")
    for method in ("prompt", "grade"):
        if not callable(getattr(task, method, None)):
            raise ConfigError(
                f"The task {kind} has no method {method!r}: a task has `name`, `prompt(index)` and "
                "`grade(prompt, completion)`."
            )
    prompt = task.prompt(0)
    if not isinstance(prompt, Prompt):
        raise ConfigError(
            f"prompt(0) of the task {task.name} is {prompt!r}: return a trustbatch.types.Prompt."
        )
    if not isinstance(prompt.id, str) or not prompt.id:
        raise ConfigError(
            f"prompt(0) of the task {task.name} has the id {prompt.id!r}: give each prompt a "
            "unique, non-empty id."
        )
