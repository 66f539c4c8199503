"""Runs whose batches take a given time: the real loop, with sleep added to sampling and training.

Sampling and training on a tiny model take milliseconds. Here each takes at least a given time, by
sleeping: what is measured is how the loop overlaps the two, not the speed of a small machine.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trustbatch.api import train_config
from trustbatch.config import parse_config
from trustbatch.loops import generate as batches
from trustbatch.models.tiny import build_model, build_tokenizer
from trustbatch.training.trainer import Trainer


class Paced:
    """A function whose n-th call lasts at least `seconds[n]`, or the last of them."""

    def __init__(self, function: Callable[..., Any], seconds: Sequence[float]) -> None:
        self.function, self.seconds, self.num_calls = function, seconds, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call, and sleep for the rest of the time."""
        start = time.perf_counter()
        seconds = self.seconds[min(self.num_calls, len(self.seconds) - 1)]
        self.num_calls += 1
        result = self.function(*args, **kwargs)
        time.sleep(max(seconds - (time.perf_counter() - start), 0.0))
        return result


@contextmanager
def paced_loops(generate: Sequence[float], train: Sequence[float]) -> Iterator[None]:
    """Make a run take at least generate[b - 1] seconds to sample batch b, train[b - 1] to train.

    Generation calls `collect`, and training `Trainer.train`. If either is not called, nothing would
    be paced and the figures would be wrong, so that is an error.
    """
    collect, trains = batches.collect, Trainer.train
    sampling, training = Paced(collect, generate), Paced(trains, train)
    batches.collect = sampling
    Trainer.train = lambda *args, **kwargs: training(*args, **kwargs)
    try:
        yield
    finally:
        batches.collect, Trainer.train = collect, trains
    if not sampling.num_calls == training.num_calls > 0:
        raise RuntimeError(
            f"{sampling.num_calls} batches were sampled and {training.num_calls} trained on at the "
            "given pace: make pacing.py wrap what the loop calls."
        )


def make_tiny_model(folder: Path) -> str:
    """Write an untrained model of 0.33 million parameters."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_tiny(
    model: str, folder: Path, *, steps: int, prompts: int = 4, tokens: int = 4, **tables: Any
) -> list[dict[str, Any]]:
    """Train the tiny model on sums, and return the metrics of each step."""
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
