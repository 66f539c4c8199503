"""After a weight update the canary sees whether the engine followed; it disturbs nothing."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.own_task import Digits
from tests.support.sessions import train_session
from torch import Tensor

import trustbatch
from trustbatch.build.session import build_session
from trustbatch.config import parse_config
from trustbatch.errors import CanaryError
from trustbatch.loops.session import Session
from trustbatch.models.policy import Policy
from trustbatch.observe.run_folder import read_metrics
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.tasks import build_task
from trustbatch.training.canary import (
    NUM_PROMPTS,
    TOLERANCES,
    WIDEST,
    Canary,
    CanaryRecorder,
    _tolerance,
)
from trustbatch.types import Completion, GenerationRequest, Prompt, SamplingParams


class Deaf(NativeEngine):
    """Ignores the weights of an update, but counts it."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Apply the version number only."""
        self._version = version


class Anchorless(NativeEngine):
    """Records what it samples from, whatever else it is asked for."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Leave the anchor out."""
        return [
            replace(completion, anchor_logp=None, anchor_top_logp=None)
            for completion in super().generate(requests)
        ]


def tables(tiny_folder: Path, folder: Path, **rollout: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(tiny_folder), "device": "cpu"},
        "task": {"name": "arithmetic", "level": 1},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 4, **rollout},
        "training": {"steps": 3, "learning_rate": 1e-3, "warmup_fraction": 0.0},
        "run": {"folder": str(folder)},
    }


def canary_of(engine: Any, policy: Policy) -> Canary:
    task = build_task("arithmetic", seed=0)
    return Canary(engine, policy, [task.prompt(index) for index in range(NUM_PROMPTS)])


def with_engine(session: Session, engine: Any) -> Session:
    session.engine = session.canary.engine = engine
    return session


def test_a_run_with_canaries_equals_one_without(tiny_folder: Path, tmp_path: Path) -> None:
    results, weights = {}, {}
    for every in (0, 1, 2):
        folder = tmp_path / str(every)
        settings = tables(tiny_folder, folder, canary_every=every)
        result = trustbatch.train(**{**settings, "task": Digits()})
        results[every] = result.metrics
        weights[every] = load_file(result.checkpoint / "model.safetensors")

    def comparable(every: int) -> list[dict[str, float]]:
        return [
            {k: v for k, v in line.items() if not k.startswith(("time/", "canary/"))}
            for line in results[every]
        ]

    assert comparable(0) == comparable(1) == comparable(2)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    def steps_with_canary(every: int) -> list[int]:
        return [line["step"] for line in results[every] if "canary/max_abs_logratio" in line]

    assert [steps_with_canary(every) for every in (0, 1, 2)] == [[], [1, 2, 3], [2]]
    for line in results[1]:
        assert 0.0 <= line["canary/mean_abs_logratio"] <= line["canary/max_abs_logratio"] < 1e-4


def test_an_engine_that_ignores_updates_stops_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    config = parse_config(tables(tiny_folder, tmp_path, canary_every=1))
    session = build_session(config, Digits())
    with_engine(session, Deaf(Policy.load(str(tiny_folder), device="cpu"), seed=0))
    with pytest.raises(
        CanaryError,
        match=r"The engine \(native, float32, version 1\) does not sample from the trainer's "
        r"policy \(float32, version 1\): .* differ by [\d.]+ on average .* explains 0\.001",
    ):
        train_session(session)
    assert read_metrics(tmp_path / "run") == []


def test_wrong_weights_are_seen_before_the_first_sample(tiny_folder: Path, tmp_path: Path) -> None:
    session = build_session(parse_config(tables(tiny_folder, tmp_path)))
    other = Policy.load(str(tiny_folder), device="cpu")
    with torch.no_grad():
        other.model.model.layers[0].mlp.down_proj.weight.mul_(1.2)
    with pytest.raises(CanaryError, match="version 0"):
        train_session(with_engine(session, NativeEngine(other, seed=0)))


def test_a_switched_off_canary_says_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    config = parse_config(tables(tiny_folder, tmp_path, canary_every=0))
    session = build_session(config, Digits())
    train_session(with_engine(session, Deaf(Policy.load(str(tiny_folder), device="cpu"), seed=0)))


def test_the_version_is_compared_too(policy: Policy) -> None:
    with pytest.raises(CanaryError, match=r"version 3\) does not sample .* version 4\)"):
        canary_of(NativeEngine(policy, seed=0, version=3), policy).check(4)


def test_a_broken_trainer_does_not_pass(policy: Policy, tiny_folder: Path) -> None:
    engine = NativeEngine(Policy.load(str(tiny_folder), device="cpu"), seed=0)
    with torch.no_grad():
        next(policy.model.parameters()).fill_(math.nan)
    with pytest.raises(CanaryError, match="differ by nan"):
        canary_of(engine, policy).check(0)


def test_how_often_by_default(tiny_folder: Path, tmp_path: Path) -> None:
    config = parse_config(tables(tiny_folder, tmp_path))
    assert config.updates_per_canary == 10
    config = parse_config(tables(tiny_folder, tmp_path, canary_every=3))
    assert config.updates_per_canary == 3


def test_the_coarsest_precision_sets_the_tolerance() -> None:
    assert _tolerance("float32", "float32") == TOLERANCES["float32"]
    assert _tolerance("bfloat16", "float32") == TOLERANCES["bfloat16"]
    assert _tolerance("bfloat16", "fp8") == TOLERANCES["fp8"]
    assert _tolerance("something new", "float32") == WIDEST


def anchored_sampling(policy: Policy, **options: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=4,
        stop_token_ids=policy.stop_token_ids,
        top_logprobs=4,
        anchor_temperature=1.0,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("options", [{"temperature": 1.2}, {"temperature": 0.5, "top_k": 4}])
def test_the_anchor_of_a_run_is_compared_too(policy: Policy, options: dict[str, float]) -> None:
    prompts = [Prompt(id=text, text=text, answer="") for text in ("1+1=", "12+34=", "7=")]
    sampling = anchored_sampling(policy, **options)
    recorder = CanaryRecorder(policy, prompts, logprob_mode="processed", anchored=sampling)
    honest, anchorless = NativeEngine(policy, seed=0), Anchorless(policy, seed=0)
    for metrics in (
        Canary(honest, policy, prompts, anchored=sampling).check(0),
        recorder.record(version=0).check(honest),
    ):
        assert 0.0 < metrics["canary/max_abs_logratio"] < 1e-4
        assert 0.0 < metrics["canary/anchor_max_abs_logratio"] < 1e-4
    with pytest.raises(CanaryError, match="has another anchor than the trainer's policy"):
        Canary(anchorless, policy, prompts, anchored=sampling).check(0)
    with pytest.raises(CanaryError, match="has another anchor than the trainer's policy"):
        recorder.record(version=0).check(anchorless)


def test_a_run_asks_for_its_anchor_where_it_records_one(tiny_folder: Path, tmp_path: Path) -> None:
    found = {}
    for temperature in (1.0, 1.2):
        tree = tables(tiny_folder, tmp_path / str(temperature), temperature=temperature)
        session = build_session(parse_config(tree))
        found[temperature] = session.canary.check(0)
        session.engine.close()
        session.run.close()
    assert "canary/anchor_max_abs_logratio" not in found[1.0]
    assert 0.0 <= found[1.2]["canary/anchor_max_abs_logratio"] < 1e-4
