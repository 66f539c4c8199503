"""An update that never arrives is noticed by its own size; rounding is never taken for it."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.own_task import Digits
from tests.support.sessions import train_session
from torch import Tensor

from trustbatch.build.session import build_session
from trustbatch.config import parse_config
from trustbatch.errors import CanaryError
from trustbatch.models.config import LoraConfig
from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.tasks import build_task
from trustbatch.training.arrival import ArrivalWatch, ContextSample, survival
from trustbatch.training.canary import NUM_PROMPTS, Canary, CanaryRecorder
from trustbatch.training.update_share import UpdateShare
from trustbatch.types import Provenance


class Deaf(NativeEngine):
    """Ignores the weights of an update, but counts it."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Apply the version number only."""
        self._version = version


def load(folder: Path, precision: str = "float32") -> Policy:
    return Policy.load(str(folder), device="cpu", precision=precision)


def adapted(folder: Path, precision: str = "float32") -> Policy:
    policy = load(folder, precision)
    policy.add_adapters(LoraConfig(), seed=0)
    return policy


@torch.no_grad()
def adam_step(policy: Policy, learning_rate: float, seed: int = 0) -> None:
    """Move each trained parameter by the learning rate, as a first step of Adam does."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in policy.trained_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise.sign(), alpha=learning_rate)


def prompts() -> list[Any]:
    task = build_task("arithmetic", seed=0)
    return [task.prompt(index) for index in range(NUM_PROMPTS)]


def test_a_lora_update_that_never_arrives_stops_the_run_at_its_first_step(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = parse_config(
        {
            "model": {"name": str(tiny_folder), "device": "cpu", "lora": {"rank": 8}},
            "task": {"name": "arithmetic", "level": 1},
            "rollout": {
                "prompts_per_step": 4,
                "samples_per_prompt": 4,
                "max_tokens": 4,
                "canary_every": 1,
            },
            "training": {"steps": 3, "learning_rate": 2e-6, "warmup_fraction": 0.0},
            "run": {"folder": str(tmp_path)},
        }
    )
    session = build_session(config, Digits())
    session.engine = session.canary.engine = Deaf(load(tiny_folder), seed=0)
    with pytest.raises(
        CanaryError,
        match=r"reports version 1 and has not loaded it: since version 0 .* shows -?0% of it",
    ):
        train_session(session)


@pytest.mark.parametrize("engine_class", [NativeEngine, Deaf])
def test_engines_of_a_cluster_are_watched_too(tiny_folder: Path, engine_class: Any) -> None:
    policy = adapted(tiny_folder)
    recorder = CanaryRecorder(policy, prompts(), logprob_mode="processed")
    engine, watch = engine_class(load(tiny_folder), seed=0), ArrivalWatch()
    recorder.record(version=0).check(engine, watch)
    adam_step(policy, 1e-5)
    engine.load_weights(policy.named_weights(), version=1)
    reference = recorder.record(version=1)
    reference.check(engine)  # the bounds of float32 do not notice
    if engine_class is Deaf:
        with pytest.raises(CanaryError, match="has not loaded it"):
            reference.check(engine, watch)
    else:
        reference.check(engine, watch)


@pytest.mark.parametrize(
    ("trainer", "engine"), [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "fp8")]
)
def test_rounding_is_never_taken_for_a_lost_update(
    tiny_folder: Path, trainer: str, engine: str
) -> None:
    policy = adapted(tiny_folder, trainer)
    sampler = NativeEngine(load(tiny_folder, trainer), seed=0, precision=engine)
    canary = Canary(sampler, policy, prompts())
    canary.check(0)
    for version in range(1, 13):
        adam_step(policy, 1e-4, seed=version // 6)  # the same direction for some steps
        sampler.load_weights(policy.named_weights(), version)
        canary.check(version)


def test_updates_that_are_lost_in_rounding_add_up_until_they_are_noticed(
    tiny_folder: Path,
) -> None:
    policy = adapted(tiny_folder)
    canary = Canary(Deaf(load(tiny_folder), seed=0, precision="bfloat16"), policy, prompts())
    canary.check(0)

    def update(version: int) -> None:
        adam_step(policy, 2e-4)
        canary.engine.load_weights(policy.named_weights(), version)
        canary.check(version)

    update(1)  # one alone is hidden by the rounding
    with pytest.raises(CanaryError, match="has not loaded it: since version 0"):
        _ = [update(version) for version in range(2, 40)]


def sample(version: int, trainer: float, engine: float, weights: Tensor) -> ContextSample:
    """Ten contexts whose log-probs have changed by these amounts, in either direction."""
    logp = {
        (context, 3): (-1.0 + trainer * (-1) ** context, -1.0 + engine * (-1) ** context)
        for context in range(10)
    }
    return ContextSample(version, logp, [weights])


def provenance(precision: str, version: int = 1) -> Provenance:
    return Provenance(
        policy="p",
        version=version,
        engine="e",
        precision=precision,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        logprob_mode="processed",
    )


def test_an_update_that_bfloat16_can_not_hold_is_nobodys_fault() -> None:
    old = torch.full((4, 8), 0.5)  # the next number in bfloat16 is 0.50390625
    for step, precision, stops in (
        (1e-4, "float32", True),
        (1e-4, "bfloat16", False),
        (2**-8, "bfloat16", True),
        (2**-8, "something new", False),
    ):
        watch = ArrivalWatch()
        watch.check(sample(0, 0.0, 0.0, old), provenance(precision, 0))
        now = sample(1, 0.01, 0.0, old + step)
        if stops:
            with pytest.raises(CanaryError, match="shows 0% of it"):
                watch.check(now, provenance(precision))
        else:
            watch.check(now, provenance(precision))


def test_a_constant_error_of_the_engine_cancels() -> None:
    watch, weights = ArrivalWatch(), torch.ones(2, 2)
    biased = sample(0, 0.0, 0.002, weights)
    watch.check(biased, provenance("float32", 0))
    watch.check(sample(1, 0.02, 0.022, weights), provenance("float32"))
    with pytest.raises(CanaryError, match="since version 1"):
        watch.check(sample(2, 0.04, 0.022, weights), provenance("float32", 2))


def test_how_much_of_an_update_survives() -> None:
    old = torch.full((4, 8), 0.5)
    # a quarter of the entries move by one step of bfloat16, 2^-8, and the rest not at all, where
    # all were moved by a quarter of it: <d', d> / <d, d> = (8 * 4 d * d) / (32 * d * d) = 1
    new = old + 2**-10
    assert survival([old], [new], "bfloat16") == 0.0
    spread = old + torch.arange(32).reshape(4, 8) * 2**-13  # all positions between two numbers
    assert survival([spread], [spread + 2**-10], "bfloat16") == pytest.approx(1.0, abs=0.1)
    assert survival([old], [new], "float32") == 1.0


def test_the_share_and_its_error() -> None:
    effect = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0, 1.0])
    shown = torch.tensor([1.0, 2.0, 1.0, 0.0, 0.0, 0.0])
    # <shown, effect> = 1 + 4 + 1 = 6, <effect, effect> = 12
    share = UpdateShare.of(shown, effect, torch.arange(6))
    assert share.value == pytest.approx(0.5)
    # without one of effect 1: 5/11 or 6/11, without one of effect 2: 2/8 or 6/8; differences
    # 1/22 four times and 1/4 twice, and (6 - 1) / 6 of the sum of squares
    assert share.error == pytest.approx(math.sqrt(5 / 6 * (4 / 22**2 + 2 / 16)))
    few = UpdateShare.of(shown, effect, torch.tensor([0, 0, 0, 1, 1, 1]))
    assert few.error == math.inf
    assert not few.is_below(0.5, 5.0)
    assert not few.is_above(0.5, 5.0)


def test_rounding_that_begins_with_the_first_update_is_no_lost_update() -> None:
    """Adapters that are 0 round alike on both sides; afterwards each side rounds on its own."""
    watch, weights = ArrivalWatch(), torch.ones(2, 2)

    def check(version: int, trainer: float, engine: float) -> None:
        # 24 contexts in which the two change without correlation
        logp = {
            (n, 3): (-1.0 + trainer * (-1) ** n, -1.0 + engine * (-1) ** (n // 2))
            for n in range(24)
        }
        watch.check(ContextSample(version, logp, [weights]), provenance("float32", version))

    check(0, 0.0, 0.0)
    check(1, 0.01, 0.004)
    with pytest.raises(CanaryError, match="has not loaded it"):
        check(2, 0.02, 0.004)
