"""Runs whose batches take a given time: the real loops, with waiting added to drawing and training.

Drawing and training on a tiny model take milliseconds. Here each lasts at least as long as it is
told, by sleeping, so that what is measured is how a loop arranges the two, and not what else a
small machine does.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trustbatch import api
from trustbatch.api import train_config
from trustbatch.config import parse_config
from trustbatch.session import Session, open_session
from trustbatch.tiny import build_model, build_tokenizer


class Paced:
    """Something whose method `name` lasts at least `seconds[n]` in its n-th call."""

    def __init__(self, inner: Any, name: str, seconds: Sequence[float]) -> None:
        self._inner, self._name, self._seconds, self._calls = inner, name, seconds, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._paced(found) if name == self._name else found

    def _paced(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = method(*args, **kwargs)
            seconds = self._seconds[min(self._calls, len(self._seconds) - 1)]
            self._calls += 1
            time.sleep(max(seconds - (time.perf_counter() - start), 0.0))
            return result

        return call


@contextmanager
def paced_sessions(generate: Sequence[float], train: Sequence[float]) -> Iterator[None]:
    """Let runs that start here draw batch b in generate[b - 1] seconds at least, and so on."""

    def opened(*args: Any, **kwargs: Any) -> Session:
        session = open_session(*args, **kwargs)
        session.engine = Paced(session.engine, "generate", generate)
        session.trainer = Paced(session.trainer, "train", train)  # pyright: ignore
        return session

    api.open_session = opened
    try:
        yield
    finally:
        api.open_session = open_session


def make_tiny_model(folder: Path) -> str:
    """Write an untrained model of 0.33 million parameters."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_tiny(
    model: str, folder: Path, *, steps: int, prompts: int = 4, tokens: int = 4, **tables: Any
) -> list[dict[str, Any]]:
    """Train the tiny model on sums; returns the metrics, one dictionary a step."""
    rollout = {"prompts_per_step": prompts, "samples_per_prompt": 4, "max_tokens": tokens}
    tree = {
        "model": {"name": model, "device": "cpu"},
        "task": {"name": "arithmetic"},
        "objective": {"name": "grpo"},
        "training": {"steps": steps},
        "run": {"folder": str(folder), "name": "run", "checkpoint_every": steps},
        **tables,
    }
    tree["rollout"] = rollout | tree.get("rollout", {})
    return train_config(parse_config(tree)).metrics
