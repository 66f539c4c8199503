"""Quantized weights on a real GPU: kernels, the engine's graphs, compiled layers, and memory."""

from pathlib import Path

import pytest
import torch
from tests.support.training_cases import (
    flat,
    make_trainer,
    policy_logp,
    sample_sequences,
    train,
    watch_gradients,
)

from trustbatch.models.config import LoraConfig
from trustbatch.models.policy import Policy
from trustbatch.models.quantization.formats import FORMATS, Codes, quantize
from trustbatch.models.quantization.layer import quantized_layers
from trustbatch.rollout.native.decoder import LlamaDecoder
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.training.layers import compile_layers

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("peft")

NAMES = sorted(FORMATS)


def on_cpu(weight: Codes) -> Codes:
    return Codes(weight.codes.cpu(), weight.scales.cpu(), weight.format, weight.columns)


def coded(name: str, outputs: int, columns: int) -> Codes:
    values = torch.randn(outputs, columns, generator=torch.Generator().manual_seed(0))
    values[0, :64] = 0
    return quantize(values.cuda(), name)


def quantized_policy(folder: Path, name: str | None, *, precision: str = "bfloat16") -> Policy:
    config = LoraConfig(rank=4)
    policy = Policy.load(
        str(folder), device="cuda", precision=precision, lora=config, quantization=name
    )
    policy.add_adapters(config, seed=0)
    return policy


def errors(policy: Policy, engine: NativeEngine) -> torch.Tensor:
    """Log-probs of the trainer minus those of the engine."""
    sampled = sample_sequences(policy, engine=engine)
    recorded = torch.cat([each.completion.behavior_logp for each in sampled])
    return (policy_logp(policy, sampled).cpu() - recorded).double()


@pytest.mark.parametrize("columns", [75, 160, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_the_cpu(name: str, columns: int) -> None:
    weight = coded(name, 96, columns)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(weight.dequantized(dtype).cpu(), on_cpu(weight).dequantized(dtype))


@pytest.mark.parametrize("columns", [512, 1024, 1152])
@pytest.mark.parametrize("rows", [1, 5, 16, 64, 100])
@pytest.mark.parametrize("name", NAMES)
def test_a_fused_product_multiplies_the_same_numbers(
    name: str, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trustbatch.models.quantization import kernels

    # 4 tiles of columns are one sum; 8 and 9 are two, of which 9 have uneven ones
    monkeypatch.setattr(kernels, "num_processors", lambda device: 132)
    weight = coded(name, 200, columns)  # the last tile of outputs is a part of one
    inputs = torch.randn(rows, columns, device="cuda").bfloat16()
    assert kernels.multiplies(inputs, weight) == (rows <= kernels.FEW_ROWS)
    exact = inputs.double() @ weight.dequantized(torch.bfloat16).double().t()
    for bias in (None, torch.randn(200, device="cuda").bfloat16()):
        sums = exact if bias is None else exact + bias.double()
        found = kernels.multiply(inputs, weight, bias)
        # float32 sums, rounded once
        torch.testing.assert_close(found.double(), sums, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_split_product_is_the_same_each_time_and_in_a_graph(name: str) -> None:
    from trustbatch.models.quantization.kernels import multiply
    from trustbatch.models.quantization.tiles import Tile

    weight = coded(name, 512, 4096)
    inputs = torch.zeros(8, 4096, device="cuda").bfloat16()
    tile = Tile(splits=8)
    multiply(inputs, weight, None, tile)  # compiles the kernels, which a capture can't
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = multiply(inputs, weight, None, tile)
    for _ in range(20):
        inputs.normal_()
        first = multiply(inputs, weight, None, tile)
        graph.replay()
        assert torch.equal(first, found)


@pytest.mark.parametrize("name", NAMES)
def test_every_update_is_sampled_from_as_closely_as_a_model_without_adapters(
    tiny_folder: Path, name: str
) -> None:
    plain = Policy.load(str(tiny_folder), device="cuda", precision="bfloat16")
    floor = torch.cat([errors(plain, NativeEngine(plain, seed=seed)) for seed in range(6)])
    policy = quantized_policy(tiny_folder, name)
    engine = NativeEngine(policy, seed=0)
    assert isinstance(engine._batch.decoder, LlamaDecoder)
    found = []
    for version in range(6):  # graphs of the first generation are replayed after each update
        engine.load_weights(policy.named_weights(), version)
        found.append(errors(policy, engine))
        train(policy, sample_sequences(policy, engine=engine), num_steps=1)
    error = torch.cat(found)
    assert abs(float(error.exp().mean()) - 1) < 2e-3
    assert float(error.abs().mean()) < 1.6 * float(floor.abs().mean())


def test_float32_agrees_to_rounding(tiny_folder: Path) -> None:
    policy = quantized_policy(tiny_folder, "nf4", precision="float32")
    engine = NativeEngine(policy, seed=0)
    train(policy, sample_sequences(policy, engine=engine), num_steps=2)
    assert float(errors(policy, engine).abs().max()) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_has_no_other_weights(tiny_folder: Path, name: str) -> None:
    taken = []
    for each in (name, None):
        policy = quantized_policy(tiny_folder, each)
        before = torch.cuda.memory_allocated()
        engine = NativeEngine(policy, seed=0)
        taken.append(torch.cuda.memory_allocated() - before)
        del engine
    layers = quantized_layers(quantized_policy(tiny_folder, name).model).values()
    assert all(layer.codes.is_cuda for layer in layers)
    num_weights = sum(layer.in_features * layer.out_features for layer in layers)
    assert taken[0] - taken[1] < num_weights  # a copy in bfloat16 would be twice as much


def test_compiled_layers_have_gradients_as_exact(tiny_folder: Path) -> None:
    """Not the same weights after a step: Adam makes as much of rounding as of a gradient."""
    exact, plain, compiled = (
        quantized_policy(tiny_folder, "nf4", precision=precision)
        for precision in ("float32", "bfloat16", "bfloat16")
    )
    sequences = sample_sequences(exact)
    compile_layers(compiled.model)
    gradients = []
    for policy in (exact, plain, compiled):
        generator = torch.Generator("cuda").manual_seed(0)
        for _, parameter in policy.trained_parameters():  # B too, or A has no gradient
            parameter.data.normal_(std=0.05, generator=generator)
        trainer = make_trainer(policy, objective={"name": "reinforce"})  # which clips no token
        found = watch_gradients(trainer)
        trainer.train(sequences)
        gradients.append(flat(found))
    of_plain, of_compiled = (
        float((each - gradients[0]).norm() / gradients[0].norm()) for each in gradients[1:]
    )
    assert 0 < of_compiled < 1.5 * of_plain < 0.2
