"""Moments and inputs of layers in host memory: the same results bit for bit, and nothing kept."""

import copy
import gc
from pathlib import Path

import pytest
import torch
from tests.support.training_cases import make_trainer, sample_sequences, train, watch_gradients

from trustbatch.checkpoints.load import optimizer_state_of, restore
from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.checkpoints.save import Checkpointer
from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy
from trustbatch.training import host_memory, trainer
from trustbatch.training.config import TrainingConfig
from trustbatch.training.host_memory import HostActivations, HostAdamW
from trustbatch.training.layers import recompute_layers
from trustbatch.types import TrainSequence


@pytest.fixture
def sequences(policy: Policy) -> list[TrainSequence]:
    return sample_sequences(policy)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload on a CPU too, where it is of no use; a parameter has several parts."""
    monkeypatch.setattr(trainer, "refuse_useless_offload", lambda *_: None)
    monkeypatch.setattr(host_memory, "PART", 1024)


@pytest.mark.usefixtures("anywhere")
def test_moments_in_host_memory_give_the_same_weights(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    other = copy.deepcopy(policy)
    plain = train(policy, sequences, num_steps=3)
    moved = train(other, sequences, num_steps=3, optimizer_offload=True)
    assert isinstance(moved.optimizer, HostAdamW)
    expected, found = optimizer_state_of(plain), optimizer_state_of(moved)
    assert expected.keys() == found.keys()
    for name, state in expected.items():
        assert torch.equal(state, found[name]), name
    for (name, one), (_, two) in zip(
        policy.trained_parameters(), other.trained_parameters(), strict=True
    ):
        assert torch.equal(one, two), name


@pytest.mark.usefixtures("anywhere")
def test_a_checkpoint_is_for_both_kinds(
    policy: Policy, sequences: list[TrainSequence], tmp_path: Path
) -> None:
    """A run may begin with moments on the device, and go on with moments in host memory."""
    fresh = copy.deepcopy(policy)
    plain = train(policy, sequences, num_steps=2)
    checkpointer = Checkpointer(tmp_path, plain, keep=1)
    checkpointer.save(LoopState(step=2))
    checkpointer.close()
    plain.train(sequences)
    moved = make_trainer(fresh, optimizer_offload=True)
    restore(tmp_path / "step-2", moved)
    moved.train(sequences)
    for (name, one), (_, two) in zip(
        policy.trained_parameters(), fresh.trained_parameters(), strict=True
    ):
        assert torch.equal(one, two), name


@pytest.mark.usefixtures("anywhere")
def test_inputs_of_layers_in_host_memory_give_the_same_gradient(
    policy: Policy, sequences: list[TrainSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = copy.deepcopy(policy)
    found, num_read = [], []
    read = HostActivations._read
    monkeypatch.setattr(HostActivations, "_read", lambda *given: num_read.append(1) or read(*given))
    for each, offload in ((policy, False), (moved, True)):
        settings = {"gradient_checkpointing": True, "activation_offload": offload}
        of_run = make_trainer(each, **settings)  # type: ignore[arg-type]
        gradients = watch_gradients(of_run)
        of_run.train(sequences)
        found.append(gradients)
        assert len(num_read) == (2 if offload else 0)  # the input of each layer
    assert found[0].keys() == found[1].keys() != set()
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_every_input_is_written_and_given_up(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[torch.Size] = []
    write = HostActivations._write

    def note(self: HostActivations, tensor: torch.Tensor) -> object:
        written.append(tensor.shape)
        return write(self, tensor)

    monkeypatch.setattr(HostActivations, "_write", note)
    recompute_layers(policy.model, offload=True)
    ids = torch.arange(2, 12)[None]
    hidden = policy.model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert written == [torch.Size([1, 10, 128])] * 2  # the input of each of the two layers
    hidden.sum().backward()
    del hidden
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is host_memory._Saved]


def test_an_empty_tensor_stays_where_it_is() -> None:
    hooks, empty = HostActivations(), torch.empty(0)
    first = hooks._write(torch.ones(2))
    assert hooks._write(empty) is empty
    assert hooks._read(empty) is empty
    second = hooks._write(torch.zeros(2))
    assert isinstance(first, host_memory._Saved)
    assert isinstance(second, host_memory._Saved)
    assert second.before is not None
    assert second.before() is first  # what is read after it


def test_offload_is_refused_where_it_makes_no_sense(policy: Policy) -> None:
    for key in ("cpu_offload", "optimizer_offload", "activation_offload"):
        settings = {key: True, "gradient_checkpointing": True}
        with pytest.raises(ConfigError, match=rf"training.{key} keeps .* model.device = cpu"):
            make_trainer(policy, **settings)  # type: ignore[arg-type]
    policy.device = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"set training.optimizer_offload = true in its place"):
        make_trainer(policy, cpu_offload=True)
    with pytest.raises(ValueError, match=r"set training.gradient_checkpointing = true too"):
        TrainingConfig(activation_offload=True)
    with pytest.raises(ValueError, match="change one of the two"):
        TrainingConfig(optimizer_offload=True, optimizer="adamw_8bit")
