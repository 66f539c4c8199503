"""Formats of quantized weights, worked out again in NumPy, and the layers that have them."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from tests.support.training_cases import (
    flat,
    make_trainer,
    policy_logp,
    sample_sequences,
    train,
    watch_gradients,
)
from torch import nn
from transformers import AutoModelForCausalLM

from trustbatch.build.policies import load_model
from trustbatch.config import parse_config
from trustbatch.models.config import LoraConfig, ModelConfig
from trustbatch.models.policy import Policy
from trustbatch.models.quantization.formats import (
    FORMATS,
    NF4_LEVELS,
    bytes_per_weight,
    quantize,
)
from trustbatch.models.quantization.layer import (
    QuantizedLinear,
    quantized_layers,
)
from trustbatch.rollout.native import linear
from trustbatch.rollout.native.decoder import LlamaDecoder
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.rollout.native.quantized_linear import QuantizedProduct
from trustbatch.training.layers import compile_layers, recompute_layers

pytest.importorskip("peft")

NAMES = sorted(FORMATS)


def weight(rows: int, columns: int, *, seed: int = 0) -> torch.Tensor:
    """Normally distributed, with rows of different size and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * torch.arange(1, rows + 1)[:, None]
    values[0, :128] = 0
    return values


def layer_of(
    name: str, *, rows: int = 24, columns: int = 192, bias: bool = True
) -> QuantizedLinear:
    values = torch.randn(rows) if bias else None
    return QuantizedLinear(quantize(weight(rows, columns), name), values)


def quantized_policy(
    folder: Path, name: str | None, *, precision: str = "float32", **options: object
) -> Policy:
    config = LoraConfig.model_validate({"rank": 4} | options)
    policy = Policy.load(
        str(folder), device="cpu", precision=precision, lora=config, quantization=name
    )
    policy.add_adapters(config, seed=0)
    return policy


def test_nf4_levels_are_the_papers() -> None:
    """QLoRA, section 3: quantiles of N(0, 1), 8 of its positive side, 7 of the other, and 0."""
    last = 1 - (1 / 32 + 1 / 30) / 2
    positive = norm.ppf(np.linspace(last, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(last, 0.5, 8)[:-1])
    levels = np.sort([*positive, 0.0, *negative]) / max(positive)
    np.testing.assert_allclose(NF4_LEVELS, levels, rtol=0, atol=1e-6)


def by_numpy(values: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """The nearest numbers of a format, block by block."""
    out = np.zeros_like(values)
    for row in range(len(values)):
        size = {"nf4": 64, "int8": values.shape[1], "fp8": 128}[name]
        for start in range(0, values.shape[1], size):
            block = values[row, start : start + size]
            largest = np.abs(block).max()
            if largest:
                out[row, start : start + size] = nearest(block / largest, name) * largest
    return out


def nearest(block: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """The nearest numbers to a block whose largest magnitude is 1."""
    if name == "nf4":
        levels = np.array(NF4_LEVELS, dtype=np.float32)
    elif name == "int8":
        levels = np.arange(-127, 128, dtype=np.float32) / 127
    else:
        # 1.m * 2^e with three bits of m; below 2^-6 there are multiples of 2^-9; the largest is 448
        normal = np.array([(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)])
        positive = np.array([*(np.arange(8) / 512), *normal[normal <= 448]]) / 448
        levels = np.unique([*-positive, *positive]).astype(np.float32)
    return levels[np.abs(block[:, None] - levels).argmin(1)]


@pytest.mark.parametrize("columns", [256, 160, 75])
@pytest.mark.parametrize("name", NAMES)
def test_a_weight_becomes_the_nearest_number_of_its_block(name: str, columns: int) -> None:
    """The last block may be a part of one."""
    values = weight(12, columns)
    coded = quantize(values, name)
    expected = by_numpy(values.numpy(), name)
    np.testing.assert_allclose(coded.dequantized(torch.float32), expected, rtol=2e-6, atol=0)
    assert coded.columns == columns
    num_bytes = coded.codes.nbytes + coded.scales.nbytes
    assert num_bytes == pytest.approx(12 * columns * bytes_per_weight(name, columns))


@pytest.mark.parametrize("name", NAMES)
def test_quantized_weights_are_quantized_to_themselves(name: str) -> None:
    coded = quantize(weight(12, 320), name)
    again = quantize(coded.dequantized(torch.float32), name)
    torch.testing.assert_close(again.scales, coded.scales, rtol=1e-6, atol=0)
    # a code of -0 means the same as one of 0
    torch.testing.assert_close(
        again.dequantized(torch.float32), coded.dequantized(torch.float32), rtol=1e-6, atol=0
    )


def test_two_codes_of_a_byte_by_hand() -> None:
    """0.5 / 2 is nearest to level 10 (0.2461), and -2 / 2 is level 0: 10 * 16 + 0."""
    values = torch.zeros(1, 64)
    values[0, 3], values[0, 3 + 32] = 0.5, -2.0
    coded = quantize(values, "nf4")
    zero = NF4_LEVELS.index(0.0)
    assert coded.codes.tolist() == [[160 if at == 3 else 17 * zero for at in range(32)]]
    assert coded.scales.tolist() == [[2.0]]
    assert coded.dequantized(torch.float32)[0, [3, 35, 0]].tolist() == [2 * NF4_LEVELS[10], -2, 0]


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_numbers_are_products_of_bfloat16_numbers(name: str) -> None:
    coded = quantize(weight(12, 320), name)
    block = FORMATS[name].block_of(320)
    scales = coded.scales.repeat_interleave(block, 1)[:, :320]
    levels = coded.dequantized(torch.float32) / torch.where(scales > 0, scales, 1.0)
    # rounded to what each format has, which undoes the rounding of the division
    exact = {"nf4": levels, "int8": levels.round(), "fp8": levels.to(torch.float8_e4m3fn)}[name]
    assert torch.equal(coded.dequantized(torch.bfloat16), exact.bfloat16() * scales.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_computes_as_one_with_its_numbers(name: str, dtype: torch.dtype) -> None:
    layer = layer_of(name)
    plain = nn.Linear(192, 24)
    with torch.no_grad():
        plain.weight.copy_(layer.quantized.dequantized(dtype))
        plain.bias.copy_(layer.bias)
    inputs = torch.randn(2, 5, 192)
    results = []
    for each in (layer, plain):
        rows = inputs.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = each(rows)
        assert output.dtype == dtype
        (output.float() ** 2).sum().backward()
        assert rows.grad is not None
        results.append((output, rows.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not layer.bias.requires_grad


def test_a_layer_is_compiled_without_a_break() -> None:
    layer = layer_of("nf4")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    inputs = torch.randn(5, 192, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(inputs), layer(inputs))
    operation = torch.ops.trustbatch.dequantized.default
    parts = (layer.codes, layer.scale_bits, "nf4", 192, torch.bfloat16)
    torch.library.opcheck(operation, parts, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", NAMES)
def test_casting_a_model_leaves_codes_and_scales(name: str) -> None:
    layer = layer_of(name)
    before = layer.weight
    assert torch.equal(layer.bfloat16().weight, before)
    assert [*layer.state_dict()] == ["bias"]


def test_all_linear_layers_but_the_head(tiny_folder: Path) -> None:
    policy = quantized_policy(tiny_folder, "nf4", targets="q_proj")
    found = quantized_layers(policy.model)
    assert len(found) == 7 * policy.model.config.num_hidden_layers
    assert policy.quantization == "nf4"
    assert type(policy.model.lm_head) is nn.Linear
    assert {name.split(".")[4] for name, _ in policy.trained_parameters()} == {"q_proj"}
    assert all(layer.codes.device.type == "cpu" for layer in found.values())


@pytest.mark.parametrize("name", NAMES)
def test_adapters_learn_as_beside_ordinary_weights_of_the_same_numbers(
    tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    policy = quantized_policy(tiny_folder, name)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        for path, layer in quantized_layers(policy.model).items():
            model.get_submodule(path.removesuffix(".base_layer")).weight.copy_(layer.weight)
    plain = Policy(model, policy.tokenizer, name="plain", precision="float32")
    plain.add_adapters(LoraConfig(rank=4), seed=0)
    sequences = sample_sequences(plain)
    found = []
    for each in (policy, plain):
        trainer = make_trainer(each)
        gradients = watch_gradients(trainer)
        for _ in range(2):
            trainer.train(sequences)
        found.append(flat(gradients))
    assert float(found[0].abs().max()) > 0
    assert torch.equal(*found)
    assert torch.equal(policy_logp(policy, sequences), policy_logp(plain, sequences))


@pytest.mark.parametrize("change", ["compiled", "recomputed"])
def test_layers_that_are_compiled_or_recomputed(tiny_folder: Path, change: str) -> None:
    found = []
    for changed in (False, True):
        policy = quantized_policy(tiny_folder, "nf4")
        sequences = sample_sequences(policy)
        if changed and change == "compiled":
            compile_layers(policy.model, backend="aot_eager")
        elif changed:
            recompute_layers(policy.model)
        trainer = make_trainer(policy)
        gradients = watch_gradients(trainer)
        trainer.train(sequences)
        found.append(flat(gradients))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_native_engine_samples_from_what_is_trained(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, packs: bool
) -> None:
    if not packs:  # a build of torch without oneDNN's layout
        monkeypatch.setattr(linear, "has_onednn_products", lambda: False)
    policy = quantized_policy(tiny_folder, name)
    train(policy, sample_sequences(policy), num_steps=3)
    engine = NativeEngine(policy, seed=1)
    assert isinstance(engine._batch.decoder, LlamaDecoder)
    sequences = sample_sequences(policy, engine=engine)
    recorded = torch.cat([s.completion.behavior_logp for s in sequences])
    torch.testing.assert_close(recorded, policy_logp(policy, sequences), rtol=0, atol=1e-5)
    without = policy_logp(quantized_policy(tiny_folder, None), sequences)
    assert not torch.allclose(recorded, without, atol=1e-3)


@pytest.mark.parametrize("targets", ["all-linear", "q_proj"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_products_in_bfloat16_are_the_trainers_bit_for_bit(
    tiny_folder: Path, name: str, targets: str
) -> None:
    policy = quantized_policy(tiny_folder, name, precision="bfloat16", targets=targets)
    for _, parameter in policy.trained_parameters():
        parameter += 0.1 * torch.randn(parameter.shape)
    decoder = NativeEngine(policy, seed=0)._batch.decoder
    assert isinstance(decoder, LlamaDecoder)
    decoder.refresh()
    for own, layer in zip(decoder.layers, policy.model.model.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        for product, parts in (
            (own.qkv, [attention.q_proj, attention.k_proj, attention.v_proj]),
            (own.gate_up, [mlp.gate_proj, mlp.up_proj]),
            (own.down, [mlp.down_proj]),
        ):
            inputs = torch.randn(5, parts[0].in_features)
            with policy.autocast():
                expected = torch.cat([part(inputs) for part in parts], -1)
            assert torch.equal(product(inputs.bfloat16()), expected)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_joined_products_share_their_codes_with_the_layers(name: str) -> None:
    layers = [layer_of(name, rows=rows, bias=rows != 8) for rows in (24, 8)]
    weights = torch.cat([layer.weight for layer in layers])
    inputs = torch.randn(5, 192)
    expected = torch.cat([layer(inputs) for layer in layers], -1)
    product = QuantizedProduct(layers, torch.float32)
    torch.testing.assert_close(product(inputs), expected, rtol=0, atol=1e-3)  # numbers up to 1000
    assert torch.equal(torch.cat([layer.weight for layer in layers]), weights)
    stored = product.weight.codes.untyped_storage().data_ptr()
    assert [layer.codes.untyped_storage().data_ptr() for layer in layers] == [stored] * 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@torch.no_grad()
def test_engines_elsewhere_get_the_numbers_of_the_trainers_products(
    tiny_folder: Path, precision: str
) -> None:
    policy = quantized_policy(tiny_folder, "nf4", precision=precision)
    assert policy.adapters is not None
    frozen, merged = dict(policy.adapters.frozen_weights()), dict(policy.named_weights())
    assert frozen.keys() == merged.keys()
    for path, layer in quantized_layers(policy.model).items():
        name = path.replace(".base_layer", "") + ".weight"
        with policy.autocast():
            own = layer(torch.eye(layer.in_features))
        assert torch.equal(frozen[name].float(), own.t().float())
        assert torch.equal(merged[name], own.t().float())  # B is 0


def test_an_engine_without_adapters_keeps_its_quantized_weights(tiny_folder: Path) -> None:
    policy = Policy.load(str(tiny_folder), device="cpu", precision="float32", quantization="nf4")
    engine = NativeEngine(policy, seed=0)
    before = sample_sequences(policy, engine=engine)
    engine.load_weights(policy.named_weights(), version=0)
    after = sample_sequences(policy, engine=engine)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.completion.behavior_logp, other.completion.behavior_logp)


@pytest.mark.parametrize("adapted", [True, False])
def test_a_saved_model_is_an_ordinary_one(tiny_folder: Path, tmp_path: Path, adapted: bool) -> None:
    policy = Policy.load(str(tiny_folder), device="cpu", precision="float32", quantization="nf4")
    if adapted:
        policy.add_adapters(LoraConfig(rank=4), seed=0)
        train(policy, sample_sequences(policy), num_steps=2)
    policy.save(tmp_path)
    ids = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9]])
    with torch.no_grad():
        own, loaded = policy.logits(ids, num_last=8), AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(loaded(input_ids=ids).logits, own, rtol=0, atol=1e-5)
    assert {name for name, _ in policy.named_weights()} == {
        name for name, _ in loaded.named_parameters()
    }


def test_frozen_weights_without_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"add the table \[model.lora\]"):
        ModelConfig(name="model", quantization="nf4")


def test_fp8_has_no_kernels_on_older_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_kernels(name: str, capability: tuple[int, int], *, is_cuda: bool = True) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        codes = quantize(weight(2, 64), name)
        on_gpu = SimpleNamespace(is_cuda=is_cuda, device="cuda")
        return replace(codes, codes=on_gpu).has_kernels  # type: ignore[arg-type]

    assert has_kernels("fp8", (8, 9))
    assert not has_kernels("fp8", (8, 6))
    assert has_kernels("nf4", (8, 0))
    assert not has_kernels("nf4", (9, 0), is_cuda=False)


def test_a_reference_of_another_name_stays_as_it_is(tiny_folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_folder, tmp_path / "other")
    config = parse_config(
        {
            "model": {
                "name": str(tiny_folder),
                "device": "cpu",
                "quantization": "int8",
                "lora": {"rank": 2},
            },
            "task": {"name": "arithmetic"},
        }
    )
    assert load_model(config).quantization == "int8"
    assert load_model(config, str(other)).quantization is None
