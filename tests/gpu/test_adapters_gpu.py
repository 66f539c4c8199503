"""Adapters on a real GPU: one copy of the frozen weights, in CUDA graphs that see each update."""

from pathlib import Path

import pytest
import torch
from tests.support.training_cases import policy_logp, sample_sequences, train

from trustbatch.models.config import LoraConfig
from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("peft")


def adapted_policy(folder: Path, *, precision: str = "bfloat16", **options: object) -> Policy:
    """The tiny model with fresh adapters."""
    config = LoraConfig.model_validate({"rank": 4} | options)
    policy = Policy.load(str(folder), device="cuda", precision=precision, lora=config)
    policy.add_adapters(config, seed=0)
    return policy


def errors(policy: Policy, engine: NativeEngine) -> torch.Tensor:
    """Log-probs of the trainer minus those of the engine."""
    sampled = sample_sequences(policy, engine=engine)
    recorded = torch.cat([each.completion.behavior_logp for each in sampled])
    return (policy_logp(policy, sampled).cpu() - recorded).double()


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
@pytest.mark.parametrize("base", ["bfloat16", "float32"])
def test_every_update_is_sampled_from_as_closely_as_a_model_without_adapters(
    tiny_folder: Path, base: str, targets: object
) -> None:
    plain = Policy.load(str(tiny_folder), device="cuda", precision="bfloat16")
    floor = torch.cat([errors(plain, NativeEngine(plain, seed=seed)) for seed in range(6)])
    policy = adapted_policy(tiny_folder, base_precision=base, targets=targets)
    engine = NativeEngine(policy, seed=0)
    found = []
    for version in range(6):  # graphs of the first generation are replayed after each update
        engine.load_weights(policy.named_weights(), version)
        found.append(errors(policy, engine))
        train(policy, sample_sequences(policy, engine=engine), num_steps=1)
    error = torch.cat(found)
    assert abs(float(error.exp().mean()) - 1) < 2e-3
    assert float(error.abs().mean()) < 1.6 * float(floor.abs().mean())


def test_float32_agrees_to_rounding(tiny_folder: Path) -> None:
    policy = adapted_policy(tiny_folder, precision="float32")
    engine = NativeEngine(policy, seed=0)
    for _ in range(3):
        train(policy, sample_sequences(policy, engine=engine), num_steps=1)
        assert float(errors(policy, engine).abs().max()) < 1e-4


def test_adapters_beside_fp8_weights(tiny_folder: Path) -> None:
    """What training adds is not rounded to FP8, so an update does not vanish."""
    policy = adapted_policy(tiny_folder)
    engine = NativeEngine(policy, seed=0, precision="fp8")
    train(policy, sample_sequences(policy, engine=engine), num_steps=2)
    assert float(errors(policy, engine).abs().mean()) < 0.3


def test_the_engine_takes_no_memory_for_frozen_weights(tiny_folder: Path) -> None:
    taken = {}
    for base in ("float32", "bfloat16"):
        policy = adapted_policy(tiny_folder, base_precision=base)
        before = torch.cuda.memory_allocated()
        engine = NativeEngine(policy, seed=0)
        taken[base] = torch.cuda.memory_allocated() - before
        del engine
    frozen = [each for each in policy.model.parameters() if not each.requires_grad]
    rounded = sum(each.nbytes for each in frozen if each.dtype == torch.bfloat16)
    embedding = policy.model.model.embed_tokens.weight.nbytes
    # what a float32 base has beside it: products and head in bfloat16
    assert taken["float32"] - taken["bfloat16"] > 0.9 * (rounded - embedding)
