"""Policies that learn from an environment's answers, on a real tiny model."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import trustbatch
from trustbatch.models.tiny import build_model, build_tokenizer
from trustbatch.tasks.environments.calculator import Calculator
from trustbatch.tasks.environments.guess_number import GuessNumber

GUESS = GuessNumber(highest=3, guesses=2, higher="+", lower="-", invitation="{highest}=")
CALCULATOR = Calculator(digits=1, opening="", closing="=", refusal="-", instruction="{problem}=")
"""both in the few characters that the tiny model knows"""
CALLS = 0.2
"""share of the examples in which the calculator is asked"""
IGNORED = -100

Said = list[tuple[str, bool]]
"""texts of an episode, and whether the policy said them"""


def random_game(rng: random.Random) -> Said:
    """A game played without thought: every number is guessed equally often."""
    secret = rng.randint(1, GUESS.highest)
    said: Said = [(f"{GUESS.highest}=", False)]
    for _ in range(GUESS.guesses):
        guess = rng.randint(1, GUESS.highest)
        said += [(f"{guess}</s>", True), ("+" if guess < secret else "-", False)]
        if guess == secret:
            break
    return said[:-1]


def random_product(rng: random.Random) -> Said:
    """Mostly a wild answer; now and then the calculator is asked, and its answer repeated."""
    first, second = rng.randint(1, 9), rng.randint(1, 9)
    problem, result = f"{first}*{second}=", str(first * second)
    if rng.random() < CALLS:
        asked = [(f"{problem}</s>", True), (result, False), (f"{result}</s>", True)]
        return [(problem, False), *asked]
    return [(problem, False), (f"{rng.randint(1, 81)}</s>", True)]


def teach(folder: Path, example: Callable[[random.Random], Said], *, steps: int, seed: int) -> Path:
    """Make a model that speaks as the examples do; what the environment says is not learned."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        inputs, targets = [], []
        for said in (example(rng) for _ in range(64)):
            parts = [(tokenizer.encode(text), is_own) for text, is_own in said]
            inputs.append(torch.tensor([token for ids, _ in parts for token in ids]))
            targets.append(
                torch.tensor([t if is_own else IGNORED for ids, is_own in parts for t in ids])
            )
        logits = model(input_ids=pad_sequence(inputs, batch_first=True)[:, :-1]).logits
        target = pad_sequence(targets, batch_first=True, padding_value=IGNORED)[:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(model: Path, task: Any, *, steps: int, learning_rate: float, seed: int) -> Any:
    result = trustbatch.train(
        model={"name": str(model), "device": "cpu"},
        task=task,
        objective="p3o",
        seed=seed,
        rollout={"prompts_per_step": 64, "samples_per_prompt": 4, "max_tokens": 14},
        training={"steps": steps, "learning_rate": learning_rate},
        run={"name": task.name, "folder": str(model.parent / "runs")},
    )
    return result.metrics


def mean(lines: list[dict[str, float]], key: str) -> float:
    return sum(line[key] for line in lines) / len(lines)


@pytest.mark.slow
def test_a_policy_learns_to_use_the_hints(tmp_path: Path) -> None:
    """Two guesses of three numbers find 2/3 at most, if nobody listens: hints alone lead beyond.

    Seeds 0 to 4 go from 0.52 to 0.59 in the first step to 0.99 and more in the last five.
    """
    model = teach(tmp_path / "model", random_game, steps=50, seed=0)
    metrics = train(model, GUESS, steps=30, learning_rate=2e-3, seed=0)
    assert metrics[0]["reward/mean"] < 2 / 3
    assert mean(metrics[-5:], "reward/mean") > 0.9
    assert mean(metrics, "episode/turns_mean") > 1.5
    assert mean(metrics[-5:], "episode/ended_fraction") > 0.95
    assert all(line["tokens/count"] == line["episode/sampled_tokens"] for line in metrics)


@pytest.mark.long
def test_a_policy_that_seldom_asks_learns_to_use_the_calculator(tmp_path: Path) -> None:
    """It can ask and repeat an answer, but mostly guesses; asking more often is what pays.

    Seeds 0 to 4 go from 0.11 to 0.20 in the first step to 0.75 to 0.93 in the last five.
    """
    model = teach(tmp_path / "model", random_product, steps=200, seed=0)
    metrics = train(model, CALCULATOR, steps=20, learning_rate=5e-4, seed=0)
    first, last = metrics[0], metrics[-5:]
    assert first["reward/mean"] < 0.35
    assert mean(last, "reward/mean") > first["reward/mean"] + 0.35
    assert mean(last, "episode/turns_mean") > first["episode/turns_mean"] + 0.4
