"""Environments of all shapes for tests, played in other processes."""

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Counting:
    """Gymnasium's shape: say anything; 1 for each digit, over after `turns` turns."""

    def __init__(self, turns: int = 2, log: str = "", limit: int = 99) -> None:
        self.turns, self.log, self.limit = turns, log, limit
        self.played = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.first = random.Random(seed).randrange(10, 99)
        return f"{self.first}=", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.played += 1
        reward = float(sum(character.isdigit() for character in action))
        is_cut = self.played >= self.limit
        return f"{self.first}+", reward, self.played >= self.turns, is_cut, {}

    def close(self) -> None:
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(f"closed after {self.played}\n")


class Troubled(Counting):
    """Fails in a way of its own in the second turn, where it was started with an even number."""

    def __init__(self, trouble: str, **options: Any) -> None:
        super().__init__(turns=3, **options)
        self.trouble = trouble

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.played == 1 and self.first % 2 == 0:
            if self.trouble == "hangs":
                time.sleep(600)
            if self.trouble == "dies":
                os._exit(3)
            if self.trouble == "raises":
                raise RuntimeError("the dice are lost")
            if self.trouble == "gives no number":
                return "+", float("nan"), False, False, {}
        return super().step(action)


class Forgetful(Counting):
    """Does not keep to its seed."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return super().reset(time.monotonic_ns())


class OldGym:
    """`reset()` without a seed, and four values of `step`."""

    def reset(self) -> str:
        return "1="

    def step(self, action: str) -> tuple[str, int, bool, dict[str, Any]]:
        return "+", 1, True, {}


class Sky:
    """SkyRL Gym's shape: the conversation comes from the data."""

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        done = action == "7"
        return {
            "observations": [] if done else [{"role": "user", "content": "+"}],
            "reward": float(done),
            "done": done,
            "metadata": {},
        }


def make_sky() -> tuple[Sky, list[dict[str, str]]]:
    return Sky(), [{"role": "system", "content": "0"}, {"role": "user", "content": "3+4="}]


@dataclass
class Action:
    message: str


@dataclass
class Seen:
    echoed: str


@dataclass
class Result:
    observation: Seen
    reward: float | None
    done: bool


class Open:
    """OpenEnv's shape: typed actions and observations, in results."""

    tools = ({"type": "function", "function": {"name": "echo"}},)

    def reset(self, **options: Any) -> Result:
        return Result(Seen(f"{options['seed'] % 10}="), None, False)

    def step(self, action: Action) -> Result:
        return Result(Seen(action.message[::-1]), 0.5, action.message == "")


def observed(observation: Seen) -> str:
    return observation.echoed


def make_nothing() -> object:
    return object()
