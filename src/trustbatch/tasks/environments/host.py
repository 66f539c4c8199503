"""The process side of an environment: makes it, plays one episode at a time, and closes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trustbatch.tasks.base import Reply
from trustbatch.tasks.environments.shapes import Observed, start, step
from trustbatch.utils.imports import load_object


@dataclass(frozen=True, slots=True)
class Start:
    """Begin an episode."""

    seed: int


@dataclass(frozen=True, slots=True)
class Act:
    """Take the policy's turn."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """Close the environment."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What the policy sees first."""

    observation: Reply
    tools: list[Any] | None = None
    """schemas for the chat template, where the environment has `tools`"""


@dataclass
class EnvironmentHost:
    """The function of a worker process; it remembers the episode that it plays.

    A factory, and the two functions that convert, are objects or paths such as "my_env.py:make".
    """

    factory: Callable[..., Any] | str
    options: Mapping[str, Any]
    action: Callable[[str], Any] | str | None = None
    observation: Callable[[Any], Any] | str | None = None
    _environment: Any = field(default=None, init=False)

    def prepare(self) -> None:
        """Import what the paths name."""
        for name in ("factory", "action", "observation"):
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, load_object(value))

    def __call__(self, item: Start | Act | End) -> Opening | Observed | None:
        """Do one item of a session."""
        if isinstance(item, Start):
            return self._start(item.seed)
        if isinstance(item, Act):
            assert not isinstance(self.action, str)
            action = item.text if self.action is None else self.action(item.text)
            return step(self._environment, action, self._as_text)
        self._close()
        return None

    @property
    def _as_text(self) -> Callable[[Any], Any] | None:
        assert not isinstance(self.observation, str)
        return self.observation

    def _start(self, seed: int) -> Opening:
        self._close()
        assert not isinstance(self.factory, str)
        made = self.factory(**self.options)
        conversation: Any = []
        if isinstance(made, tuple):
            made, conversation = made
        self._environment = made
        observation = start(made, seed, conversation, self._as_text)
        return Opening(observation, getattr(made, "tools", None))

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        getattr(environment, "close", lambda: None)()
