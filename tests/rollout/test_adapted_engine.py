"""The native engine with adapters: the trainer's products, on its only copy of the weights."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.training_cases import policy_logp, sample_sequences, train
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from trustbatch.models.config import LoraConfig
from trustbatch.models.policy import Policy
from trustbatch.rollout.native import linear
from trustbatch.rollout.native.decoder import LlamaDecoder
from trustbatch.rollout.native.engine import NativeEngine

pytest.importorskip("peft")


def adapted_policy(folder: Path, *, precision: str = "bfloat16", **options: object) -> Policy:
    """The tiny model with adapters that add something, and biases where there are some."""
    config = LoraConfig.model_validate({"rank": 4} | options)
    policy = Policy.load(str(folder), device="cpu", precision=precision, lora=config)
    policy.add_adapters(config, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.trained_parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def decoder_of(engine: NativeEngine) -> LlamaDecoder:
    decoder = engine._batch.decoder
    assert isinstance(decoder, LlamaDecoder)
    decoder.refresh()
    return decoder


def products_and_layers(engine: NativeEngine) -> Iterator[tuple[Any, list[Any]]]:
    """The engine's products, each with the trainer's layers that it stands for."""
    decoder = decoder_of(engine)
    for own, layer in zip(decoder.layers, engine.policy.model.model.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        yield own.qkv, [attention.q_proj, attention.k_proj, attention.v_proj]
        yield own.output, [attention.o_proj]
        yield own.gate_up, [mlp.gate_proj, mlp.up_proj]
        yield own.down, [mlp.down_proj]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "up_proj"]])
@pytest.mark.parametrize("base", ["bfloat16", "float32"])
@torch.no_grad()
def test_products_are_the_trainers_bit_for_bit(
    tiny_folder: Path, base: str, targets: object
) -> None:
    policy = adapted_policy(tiny_folder, base_precision=base, targets=targets)
    for product, layers in products_and_layers(NativeEngine(policy, seed=0)):
        inputs = torch.randn(5, layers[0].in_features)
        with policy.autocast():
            expected = torch.cat([layer(inputs) for layer in layers], -1)
        assert expected.dtype == torch.bfloat16
        assert torch.equal(product(inputs.bfloat16()), expected)


@torch.no_grad()
def test_products_in_float32_are_the_trainers_to_rounding(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = adapted_policy(tiny_folder, precision="float32")
    packed = NativeEngine(policy, seed=0)
    monkeypatch.setattr(linear, "has_onednn_products", lambda: False)
    for engine in (packed, NativeEngine(policy, seed=0)):
        for product, layers in products_and_layers(engine):
            inputs = torch.randn(5, layers[0].in_features)
            expected = torch.cat([layer(inputs) for layer in layers], -1)
            torch.testing.assert_close(product(inputs), expected, rtol=0, atol=2e-5)


@torch.no_grad()
def test_biases_are_those_of_the_frozen_layers(tiny_folder: Path) -> None:
    policy = Policy.load(str(tiny_folder), device="cpu", precision="bfloat16")
    for layer in policy.model.model.layers:
        layer.self_attn.q_proj.bias = nn.Parameter(torch.randn(layer.self_attn.q_proj.out_features))
    policy.add_adapters(LoraConfig(rank=2), seed=0)
    for product, layers in products_and_layers(NativeEngine(policy, seed=0)):
        inputs = torch.randn(3, layers[0].in_features)
        with policy.autocast():
            expected = torch.cat([layer(inputs) for layer in layers], -1)
        assert torch.equal(product(inputs.bfloat16()), expected)


def test_log_probs_are_as_close_to_the_trainers_as_without_adapters(tiny_folder: Path) -> None:
    """Merged weights, rounded to bfloat16, are twice as far away."""
    plain = Policy.load(str(tiny_folder), device="cpu", precision="bfloat16")
    trained = Policy.load(str(tiny_folder), device="cpu", precision="bfloat16")
    trained.add_adapters(LoraConfig(rank=4), seed=0)
    train(trained, sample_sequences(plain), num_steps=4)
    errors, shares = [], []
    for policy in (plain, trained):
        sampled = [
            sequence
            for seed in range(6)
            for sequence in sample_sequences(policy, engine=NativeEngine(policy, seed=seed))
        ]
        recorded = torch.cat([each.completion.behavior_logp for each in sampled])
        error = (policy_logp(policy, sampled) - recorded).double()
        ratio = error.exp()
        assert abs(float(ratio.mean()) - 1) < 2e-3
        errors.append(float(error.abs().mean()))
        shares.append(float(1 - ratio.sum() ** 2 / ratio.pow(2).sum() / len(ratio)))
    assert errors[1] < 1.5 * errors[0]
    assert shares[1] < 2 * shares[0] < 1e-3


def test_the_next_generation_has_the_adapters_of_the_last_step(tiny_folder: Path) -> None:
    policy = adapted_policy(tiny_folder)
    engine = NativeEngine(policy, seed=0)
    inputs = torch.randn(2, 128).bfloat16()
    product = decoder_of(engine).layers[0].qkv
    before = product(inputs)
    train(policy, sample_sequences(policy, engine=engine), num_steps=1)
    assert torch.equal(product(inputs), before)
    pointers = [each.data_ptr() for each in tensors_of(engine)]
    sampled = sample_sequences(policy, engine=engine)
    assert not torch.equal(product(inputs), before)
    # CUDA graphs read the same memory
    assert [each.data_ptr() for each in tensors_of(engine)] == pointers
    recorded = torch.cat([each.completion.behavior_logp for each in sampled])
    torch.testing.assert_close(recorded, policy_logp(policy, sampled), rtol=0, atol=0.15)


def tensors_of(engine: NativeEngine) -> list[Tensor]:
    """What the products of all layers hold."""
    products = [product for product, _ in products_and_layers(engine)]
    parts = [*products, *(product.base for product in products if hasattr(product, "base"))]
    return [each for part in parts for each in vars(part).values() if isinstance(each, Tensor)]


def test_no_weight_exists_twice(tiny_folder: Path) -> None:
    policy = adapted_policy(tiny_folder)
    weights = sum(parameter.nbytes for parameter in policy.model.parameters())
    engine = NativeEngine(policy, seed=0)
    assert sum(parameter.nbytes for parameter in policy.model.parameters()) == weights
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in (*policy.model.parameters(), *tensors_of(engine))
    }
    # beside all parameters: A and B in bfloat16, and at most 15 further rows per product
    adapters = sum(parameter.numel() for _, parameter in policy.trained_parameters())
    padding = 15 * sum(
        layers[0].in_features * 2 for _, layers in products_and_layers(engine)
    ) + 2 * 4 * sum(layer.out_features for _, ls in products_and_layers(engine) for layer in ls)
    assert weights < sum(storages.values()) <= weights + 2 * adapters + padding
    assert weights + 2 * adapters + padding < 1.5 * weights


def test_engines_of_one_policy_share_its_matrices(tiny_folder: Path) -> None:
    policy = adapted_policy(tiny_folder)
    first = decoder_of(NativeEngine(policy, seed=0)).layers[0].qkv
    second = decoder_of(NativeEngine(policy, seed=1)).layers[0].qkv
    assert first.base.weight.data_ptr() == second.base.weight.data_ptr()  # type: ignore[attr-defined]
    copied = copy.deepcopy(policy)
    third = decoder_of(NativeEngine(copied, seed=1)).layers[0].qkv
    inputs = torch.randn(2, 128).bfloat16()
    assert torch.equal(third(inputs), first(inputs))
    assert third.base.weight.data_ptr() != first.base.weight.data_ptr()  # type: ignore[attr-defined]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]])
def test_joined_weights_are_saved_as_ordinary_ones(
    tiny_folder: Path, tmp_path: Path, targets: object
) -> None:
    policy = adapted_policy(tiny_folder, targets=targets)
    expected = {name: weight.clone() for name, weight in policy.named_weights()}
    NativeEngine(policy, seed=0)
    policy.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {each.dtype for each in stored.values()} == {torch.float32}
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert saved.keys() == expected.keys()
    for name, weight in expected.items():
        assert saved[name].dtype == torch.float32
        assert torch.equal(saved[name], weight), name


@torch.no_grad()
def test_adapters_beside_fp8_weights_are_not_rounded_to_fp8(tiny_folder: Path) -> None:
    """A small update would vanish in weights with three bits of mantissa."""
    policy = adapted_policy(tiny_folder, precision="float32")
    for product, layers in products_and_layers(NativeEngine(policy, seed=0, precision="fp8")):
        inputs = torch.randn(5, layers[0].in_features)
        added = torch.cat([layer(inputs) - layer.base_layer(inputs) for layer in layers], -1)
        found = product(inputs) - product.base(inputs)
        torch.testing.assert_close(found, added, rtol=0, atol=1e-4)
