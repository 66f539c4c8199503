"""1-ESS by lag: the trainer's numbers against a direct computation, however a batch is divided."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.training_cases import make_trainer, policy_logp, sample_sequences

import trustbatch
from trustbatch.batching.sequences import mini_batches
from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.training.lag_metrics import ONE_MINUS_ESS_BY_LAG, values_by_lag
from trustbatch.types import Provenance, TrainSequence

VERSION = 5
SAMPLED_AT = (5, 4, 2)


def sampled_by(sequence: TrainSequence) -> Provenance:
    return sequence.completion.provenance


def by_another(sequence: TrainSequence) -> TrainSequence:
    provenance = replace(sampled_by(sequence), policy="other")
    return replace(sequence, completion=replace(sequence.completion, provenance=provenance))


@pytest.fixture
def sequences(policy: Policy) -> list[TrainSequence]:
    """Completions of three versions, each as far from the present one as it is old, and others."""
    present = {name: value.clone() for name, value in policy.model.state_dict().items()}
    sampled: list[TrainSequence] = []
    for version in SAMPLED_AT:
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.0 + 0.02 * (VERSION - version))
        sampled += sample_sequences(
            policy, engine=NativeEngine(policy, seed=version, version=version)
        )
        policy.model.load_state_dict(present)
    return sampled + [by_another(sequence) for sequence in sampled[::7]]


def direct(policy: Policy, sequences: list[TrainSequence], lag: int) -> float:
    """1 - (sum r)^2 / (N sum r^2) over the tokens of one lag, from the definition."""
    own = [
        s
        for s in sequences
        if sampled_by(s).policy == policy.name and VERSION - sampled_by(s).version == lag
    ]
    behavior = torch.cat([s.completion.behavior_logp for s in own]).double()
    ratio = (policy_logp(policy, own).double() - behavior).exp()
    return float(1.0 - ratio.sum() ** 2 / (len(ratio) * ratio.square().sum()))


@pytest.mark.parametrize("tokens", [10_000, 40, 1])
@pytest.mark.parametrize("objective", ["grpo", "p3o"])
def test_each_lag_has_the_ess_of_its_own_tokens(
    policy: Policy, sequences: list[TrainSequence], tokens: int, objective: str
) -> None:
    expected = {lag: direct(policy, sequences, lag) for lag in (0, 1, 3)}
    trainer = make_trainer(policy, objective={"name": objective}, micro_batch_tokens=tokens)
    found = values_by_lag(trainer.train(sequences, version=VERSION), ONE_MINUS_ESS_BY_LAG)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert found[0] < 1e-9 < 1e-4 < found[1] < found[3]


def test_optimizer_steps_are_averaged(policy: Policy, sequences: list[TrainSequence]) -> None:
    parts = mini_batches(sequences, 2, seed="0:0:0")
    expected = {lag: [direct(policy, part, lag) for part in parts] for lag in (1, 3)}
    trainer = make_trainer(policy, mini_batches=2, learning_rate=1e-12)
    found = values_by_lag(trainer.train(sequences, version=VERSION), ONE_MINUS_ESS_BY_LAG)
    for lag, (first, second) in expected.items():
        assert found[lag] == pytest.approx((first + second) / 2, rel=1e-3)
        assert first != pytest.approx(second, rel=1e-2)


def test_a_batch_of_one_old_version_has_that_lag_alone(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    old = [s for s in sequences if sampled_by(s).version == 2 and sampled_by(s).policy != "other"]
    metrics = make_trainer(policy).train(old, version=VERSION)
    assert values_by_lag(metrics, ONE_MINUS_ESS_BY_LAG) == {3: metrics["one_minus_ess"]}


def test_what_is_fresh_is_not_measured_twice(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    fresh = [s for s in sequences if sampled_by(s).version == VERSION]
    for batch, version in ((fresh, VERSION), (sequences, None)):
        metrics = make_trainer(policy).train(batch, version=version)
        assert not values_by_lag(metrics, ONE_MINUS_ESS_BY_LAG)


def test_a_run_measures_its_lags(tiny_folder: Path, tmp_path: Path) -> None:
    result = trustbatch.train(
        model=tiny_folder,
        task={"name": "arithmetic", "level": 1},
        rollout={"prompts_per_step": 2, "samples_per_prompt": 4, "max_tokens": 3, "lag": 2},
        training={"steps": 4, "learning_rate": 1e-2, "warmup_fraction": 0.0},
        run={"folder": str(tmp_path)},
    )
    assert [list(values_by_lag(line, ONE_MINUS_ESS_BY_LAG)) for line in result.metrics] == [
        [], [1], [2], [2],
    ]  # fmt: skip
    counts = [values_by_lag(line, "rollout/completions/lag_") for line in result.metrics]
    assert counts == [{0: 8.0}, {1: 8.0}, {2: 8.0}, {2: 8.0}]
    for line in result.metrics[1:]:
        (value,) = values_by_lag(line, ONE_MINUS_ESS_BY_LAG).values()
        assert value == line["one_minus_ess"]
