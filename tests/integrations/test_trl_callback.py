"""TrustCallback measures an unchanged GRPOTrainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training_cases import policy_logp
from tests.support.trl_cases import Sampler, make_trainer, sequences_of
from trl import GRPOTrainer

from trustbatch.errors import ConfigError
from trustbatch.integrations.trl import TrustCallback
from trustbatch.models.policy import Policy

SETTINGS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}


def train(model: Path, folder: Path, *, with_callback: bool, **arguments: Any) -> GRPOTrainer:
    trainer = make_trainer(model, folder, kind=GRPOTrainer, settings=SETTINGS, **arguments)
    if with_callback:
        trainer.add_callback(TrustCallback(trainer))
    trainer.train()
    return trainer


def test_its_numbers_are_those_computed_by_hand(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_folder,
        tmp_path,
        kind=GRPOTrainer,
        rollout_func=Sampler(tiny_folder),
        settings=SETTINGS | {"max_steps": 1},
    )
    trainer.add_callback(TrustCallback(trainer))
    trainer.train()
    log = trainer.state.log_history[0]
    # the first step's policy is the untrained model: our own log-probs of the same tokens
    policy = Policy.load(str(tiny_folder), device="cpu", precision="float32")
    assert trainer._buffered_inputs is not None
    sequences = sequences_of(trainer._buffered_inputs, policy, temperature=1.0)
    behavior = torch.cat([each.completion.behavior_logp for each in sequences]).double()
    ratio = (policy_logp(policy, sequences).double() - behavior).exp()
    ess = ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())
    assert log["tokens/count"] == len(ratio)
    assert log["one_minus_ess"] == pytest.approx(1 - ess.item(), rel=1e-4)
    assert log["one_minus_ess"] > 0.01
    assert log["ratio/mean"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert log["ratio/max"] == pytest.approx(ratio.max().item(), rel=1e-5)
    # all of it is the engine's: no update has come since
    assert log["ledger/engine/one_minus_ess"] == pytest.approx(1 - ess.item(), rel=1e-4)
    assert log["ledger/updates/one_minus_ess"] == 0


def test_updates_show_in_the_ledger(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_folder, tmp_path, kind=GRPOTrainer, settings=SETTINGS | {"num_iterations": 2}
    )
    trainer.add_callback(TrustCallback(trainer))
    trainer.train()
    fresh, updated = trainer.state.log_history[:2]
    assert fresh["one_minus_ess"] < 1e-6
    assert updated["one_minus_ess"] > 0.01
    assert updated["ledger/updates/one_minus_ess"] == pytest.approx(updated["one_minus_ess"])
    assert updated["ledger/updates/share"] == pytest.approx(1.0)


def test_training_is_unchanged(tiny_folder: Path, tmp_path: Path) -> None:
    plain, watched = (
        train(tiny_folder, tmp_path, with_callback=with_callback) for with_callback in (False, True)
    )
    for name, each in plain.model.state_dict().items():
        assert torch.equal(each, watched.model.state_dict()[name])
    for one, other in zip(plain.state.log_history, watched.state.log_history, strict=True):
        times = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
        assert {key: one[key] for key in one if key not in times} == {
            key: other[key] for key in one if key not in times
        }
    assert "one_minus_ess" in watched.state.log_history[0]
    assert "one_minus_ess" not in plain.state.log_history[0]


def test_evaluation_is_not_measured(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, tmp_path, kind=GRPOTrainer)
    callback = TrustCallback(trainer)
    trainer.add_callback(callback)
    found = trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert "eval_one_minus_ess" not in found
    assert not callback._metrics._parts


def test_a_trainer_that_logs_them_itself_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, tmp_path)
    with pytest.raises(ConfigError, match="remove it"):
        TrustCallback(trainer)
