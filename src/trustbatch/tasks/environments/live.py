"""Environments with a state: a live session per episode, in a process that can be killed."""

import hashlib
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trustbatch.errors import ConfigError, ReplyError
from trustbatch.tasks.base import EpisodeKey, Reply, Spoken, Step
from trustbatch.tasks.environments.host import Act, End, EnvironmentHost, Opening, Start
from trustbatch.tasks.environments.shapes import Observed
from trustbatch.types import Grade, GradeStatus, Prompt, Turn
from trustbatch.utils.imports import check_object_path
from trustbatch.utils.session_pool import SessionPool
from trustbatch.utils.worker import Outcome
from trustbatch.utils.worker_pool import NotPortable, Words

MEMORY_GIB = 4.0
"""for one session, beyond what its process holds when it is loaded"""
WORDS = Words(
    function="the environment",
    process="process of an environment",
    processes="processes of an environment",
    worked="played",
    items="episodes",
    limit="task.step_seconds",
    variables="task.variables",
    error=ReplyError,
)
PROMPT = ("", -1)
"""key of the session that shows a first observation for a prompt"""
SUM, LAST = "sum", "last"


@dataclass(frozen=True, kw_only=True)
class LiveEnvironment:
    """Any environment with `reset` and `step`; the reward is what its steps give."""

    grades_in_process: ClassVar[bool] = True
    """adding up the rewards of the turns needs no other process"""

    factory: str | Callable[..., Any]
    """makes an environment: "module:callable", "file.py:callable", or a callable"""
    options: Mapping[str, Any] | None = None
    """arguments of the factory"""
    action: str | Callable[[str], Any] | None = None
    """makes an action of the policy's text"""
    observation: str | Callable[[Any], Any] | None = None
    """makes text or chat messages of an observation"""
    rewards: str = SUM
    """"sum" of the steps' rewards, or that of the "last" one"""
    sessions: int | None = None
    """episodes that are played at a time, each in a process of its own; default: one per core"""
    step_seconds: float = 60.0
    """time limit of a call of the environment"""
    variables: Sequence[str] = ()
    """names of environment variables that the processes get beside the usual ones"""
    seed: int = 0
    name: str = "environment"

    def __post_init__(self) -> None:
        for path in (self.factory, self.action, self.observation):
            if isinstance(path, str):
                check_object_path(path)
        if self.rewards not in (SUM, LAST):
            raise ValueError(f"task.rewards = {self.rewards!r} must be {SUM!r} or {LAST!r}.")
        if self.sessions is not None and self.sessions < 1:
            raise ValueError("task.sessions must be at least 1.")
        if not self.step_seconds > 0:
            raise ValueError("task.step_seconds must be above 0.")

    @property
    def max_sessions(self) -> int:
        """How many episodes are played at a time."""
        return self.sessions or os.cpu_count() or 1

    def prompt(self, index: int) -> Prompt:
        """Return the first observation of the index-th episode: that of `reset` with its seed."""
        seed = seed_of(self.name, self.seed, index)
        pool = self._pool()
        outcome = pool.open({PROMPT: Start(seed)})[PROMPT]
        pool.end([PROMPT], End())
        if outcome.status is not GradeStatus.GRADED:
            raise ReplyError(
                f"The environment {self.name} can't start episode {index} with the seed {seed} "
                f"({outcome.reason}): fix it, and the same command continues the run."
            )
        opening: Opening = outcome.value
        system, text = _system_and_text(opening.observation)
        return Prompt(
            id=f"{self.name}:{self.seed}:{index}",
            text=text,
            answer="",
            system=system,
            details={"seed": seed},
            chat={} if opening.tools is None else {"tools": opening.tools},
        )

    def step_sessions(self, episodes: Sequence[Spoken]) -> list[Step]:
        """Pass the last turns to the sessions; those of first turns are started."""
        pool = self._pool()
        new = {each.key: each.prompt for each in episodes if len(each.turns) == 1}
        opened = pool.open({key: Start(prompt.details["seed"]) for key, prompt in new.items()})
        failed = {
            key: failure
            for key, outcome in opened.items()
            if (failure := _failed_start(outcome, new[key])) is not None
        }
        acts = {each.key: Act(each.turns[-1].text) for each in episodes if each.key not in failed}
        outcomes = pool.call(acts)
        return [
            Step(failure=failed[each.key]) if each.key in failed else _step_of(outcomes[each.key])
            for each in episodes
        ]

    def end_sessions(self, keys: Collection[EpisodeKey]) -> None:
        """Close the environments of episodes that are over."""
        self._pool().end(keys, End())

    def grade_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        """Return the sum of the turns' rewards, or the last; a turn that was cut has none."""
        rewards = [turn.reward for turn in turns if turn.reward is not None]
        return sum(rewards if self.rewards == SUM else rewards[-1:])

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Refuse a text alone: the steps of the episode have the rewards."""
        raise TypeError(f"the environment {self.name} grades episodes, not texts")

    def close(self) -> None:
        """End all processes."""
        pool = self.__dict__.pop("_sessions", None)
        if pool is not None:
            pool.close()

    def host(self) -> EnvironmentHost:
        """Return the function of a session's process."""
        return EnvironmentHost(self.factory, self.options or {}, self.action, self.observation)

    def _pool(self) -> SessionPool:
        """Return the processes, which start at the first use."""
        if "_sessions" not in self.__dict__:
            try:
                pool = SessionPool(
                    self.host(),
                    time_limit=self.step_seconds,
                    memory_limit_gib=MEMORY_GIB,
                    environment=self.variables,
                    words=WORDS,
                )
                pool.prepare()
            except NotPortable as error:
                raise ConfigError(
                    f"The environment {self.name} can't be loaded in a process of its own "
                    f"({error}): define its factory in a module, and fix what it imports."
                ) from error
            object.__setattr__(self, "_sessions", pool)
            weakref.finalize(self, pool.close)
        return self.__dict__["_sessions"]

    def __getstate__(self) -> dict[str, Any]:
        # graders and other ranks have no use for the processes
        return {name: value for name, value in self.__dict__.items() if name != "_sessions"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)


def seed_of(*parts: object) -> int:
    """Return a seed of 31 bits, which all random generators take."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def _system_and_text(observation: Reply) -> tuple[str, str]:
    """Return the system's and the user's message of a first observation."""
    if isinstance(observation, str):
        return "", observation
    roles = [message["role"] for message in observation]
    contents = [message["content"] for message in observation]
    if roles == ["user"]:
        return "", contents[0]
    if roles == ["system", "user"]:
        return contents[0], contents[1]
    raise ConfigError(
        f"The first observation has messages of the roles {', '.join(roles)}: make it text, or a "
        "user's message after at most one of the system."
    )


def _failed_start(outcome: Outcome, prompt: Prompt) -> Grade | None:
    """Return why a session can't be played, or None."""
    if outcome.status is not GradeStatus.GRADED:
        return Grade.failed(outcome.status, f"at its start: {outcome.reason}")
    if _system_and_text(outcome.value.observation) == (prompt.system, prompt.text):
        return None
    return Grade.failed(
        GradeStatus.FAILED,
        "it started with another observation than the prompt's: make `reset(seed)` return the "
        "same observation for the same seed",
    )


def _step_of(outcome: Outcome) -> Step:
    if outcome.status is not GradeStatus.GRADED:
        return Step(failure=Grade.failed(outcome.status, outcome.reason))
    observed: Observed = outcome.value
    return Step(reply=observed.observation, reward=observed.reward, truncated=observed.truncated)
