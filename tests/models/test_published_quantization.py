"""Checkpoints with quantized weights: those of bitsandbytes, made by it and by hand, and FP8."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.training_cases import policy_logp, sample_sequences, train
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

import trustbatch
from trustbatch.build import policies
from trustbatch.config import parse_config
from trustbatch.errors import CheckpointError, ConfigError
from trustbatch.models.config import LoraConfig
from trustbatch.models.policy import ADAPTER_FOLDER, Policy
from trustbatch.models.quantization.formats import NF4_LEVELS, unpack_halves
from trustbatch.models.quantization.layer import quantized_layers
from trustbatch.rollout.native.decoder import LlamaDecoder
from trustbatch.rollout.native.engine import NativeEngine

pytest.importorskip("peft")

IDS = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9]])
Written = tuple[dict[str, Tensor], Tensor]
"""the tensors of a layer by the ends of their names, and the weight that they stand for"""


def logits(policy: Policy) -> Tensor:
    with torch.no_grad():
        return policy.logits(IDS, num_last=8)


def loaded(folder: Path, **options: Any) -> Policy:
    return Policy.load(str(folder), device="cpu", precision="float32", **options)


def nf4_by_hand(weight: Tensor, *, block: int = 64) -> Written:
    """Random codes and scales: the first of two codes is in the high half of a byte."""
    codes = np.random.default_rng(0).integers(0, 16, weight.shape)
    scales = np.random.default_rng(1).uniform(0.01, 0.2, weight.numel() // block)
    levels = np.array(NF4_LEVELS, dtype=np.float32)
    values = levels[codes].reshape(-1, block) * scales.astype(np.float32)[:, None]
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [*weight.shape]}
    packed = (codes.reshape(-1, 2) @ [16, 1]).astype(np.uint8)
    tensors = {
        ".weight": torch.from_numpy(packed)[:, None],
        ".weight.absmax": torch.from_numpy(scales).float(),
        ".weight.quant_map": torch.from_numpy(levels),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()]).byte(),
    }
    return tensors, torch.from_numpy(values.reshape(codes.shape))


def int8_by_hand(weight: Tensor) -> Written:
    codes = torch.from_numpy(np.random.default_rng(0).integers(-127, 128, weight.shape))
    largest = torch.linspace(0.05, 0.2, len(weight))
    tensors = {".weight": codes.to(torch.int8), ".SCB": largest, ".weight_format": torch.tensor(0)}
    return tensors, codes * (largest[:, None] / 127)


def fp8_by_hand(weight: Tensor) -> Written:
    """A scale for each 128 x 128; here every layer has a part of a block, too."""
    codes = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    codes = codes.to(torch.float8_e4m3fn)
    blocks = [-(-size // 128) for size in weight.shape]
    scales = torch.linspace(0.01, 0.1, blocks[0] * blocks[1]).view(blocks)
    wide = torch.kron(scales, torch.ones(128, 128))[: weight.shape[0], : weight.shape[1]]
    return {".weight": codes, ".weight_scale_inv": scales}, codes.float() * wide


CONFIGS: dict[str, tuple[Callable[[Tensor], Written], dict[str, object]]] = {
    "nf4": (
        nf4_by_hand,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "int8": (int8_by_hand, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "fp8": (fp8_by_hand, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def write_by_hand(
    source: Path,
    folder: Path,
    name: str,
    *,
    settings: dict[str, object] | None = None,
    plain: str = "none",
    **how: Any,
) -> dict[str, Tensor]:
    """Write a folder in a format, layers called `plain` left out; return the weights it has."""
    make, config = CONFIGS[name]
    shutil.copytree(source, folder)
    tensors, weights = load_file(folder / "model.safetensors"), {}
    linears = [key for key in tensors if key.endswith("_proj.weight")]
    for path in [key for key in linears if plain not in key]:
        parts, weights[path] = make(tensors.pop(path), **how)
        tensors |= {path.removesuffix(".weight") + end: part for end, part in parts.items()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    tree = json.loads((folder / "config.json").read_text())
    tree["quantization_config"] = config | (settings or {})
    (folder / "config.json").write_text(json.dumps(tree))
    return weights


@pytest.fixture(params=sorted(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_published_format_is_what_its_files_say(
    tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    weights = write_by_hand(tiny_folder, tmp_path / "model", name)
    GenerationConfig(eos_token_id=[1, 5]).save_pretrained(tmp_path / "model")
    policy = loaded(tmp_path / "model")
    assert policy.quantization == name
    found = dict(policy.named_weights())
    for path, expected in weights.items():
        torch.testing.assert_close(found[path], expected.float(), rtol=1e-6, atol=0)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model.load_state_dict({path: each.float() for path, each in weights.items()}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(logits(policy), model(input_ids=IDS).logits, rtol=0, atol=1e-4)
    assert policy.stop_token_ids == (1, 5)


def test_a_published_format_trains_with_adapters(
    tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    write_by_hand(tiny_folder, tmp_path / "model", name)
    policy = loaded(tmp_path / "model", lora=LoraConfig())
    policy.add_adapters(LoraConfig(), seed=0)
    train(policy, sample_sequences(policy), num_steps=2)
    sequences = sample_sequences(policy, engine=NativeEngine(policy, seed=1))
    recorded = torch.cat([each.completion.behavior_logp for each in sequences])
    torch.testing.assert_close(recorded, policy_logp(policy, sequences), rtol=0, atol=1e-4)
    policy.save(tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    assert again.quantization is None
    torch.testing.assert_close(logits(again), logits(policy), rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@torch.no_grad()
def test_layers_that_were_left_out(tiny_folder: Path, tmp_path: Path, precision: str) -> None:
    write_by_hand(tiny_folder, tmp_path / "model", "nf4", plain="k_proj")
    config = LoraConfig(rank=4)
    policy = Policy.load(str(tmp_path / "model"), device="cpu", precision=precision, lora=config)
    policy.add_adapters(config, seed=0)
    assert not any("k_proj" in path for path in quantized_layers(policy.model))
    decoder = NativeEngine(policy, seed=0)._batch.decoder
    assert isinstance(decoder, LlamaDecoder)
    decoder.refresh()
    for own, layer in zip(decoder.layers, policy.model.model.layers, strict=True):
        attention, inputs = layer.self_attn, torch.randn(5, 128)
        with policy.autocast():
            parts = [attention.q_proj, attention.k_proj, attention.v_proj]
            expected = torch.cat([part(inputs) for part in parts], -1)
        tolerance = 1e-5 if precision == "float32" else 0.0
        found = own.qkv(inputs.to(expected.dtype))
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["nf4", "nested nf4", "int8"])
def test_what_bitsandbytes_has_written(tiny_folder: Path, tmp_path: Path, kind: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    config = BitsAndBytesConfig(
        load_in_4bit=kind != "int8",
        load_in_8bit=kind == "int8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=kind == "nested nf4",
    )
    model = AutoModelForCausalLM.from_pretrained(
        tiny_folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    model.save_pretrained(folder)
    found = quantized_layers(loaded(folder).model)
    assert len(found) == 7 * model.config.num_hidden_layers
    for path, layer in found.items():
        theirs = model.get_submodule(path).weight
        if kind == "int8":
            expected = functional.int8_vectorwise_dequant(theirs.data, theirs.SCB)
        else:
            expected = functional.dequantize_4bit(theirs.data, theirs.quant_state)
        torch.testing.assert_close(layer.weight, expected, rtol=1e-6, atol=0)


def test_own_nf4_is_what_bitsandbytes_makes(tiny_folder: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = load_file(tiny_folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    own = loaded(tiny_folder, quantization="nf4").model.model.layers[0].mlp.up_proj
    theirs = torch.stack([codes >> 4, codes & 15], dim=-1).view(own.out_features, -1)
    assert torch.equal(unpack_halves(own.codes), theirs)
    assert torch.equal(own.weight, functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize(
    ("settings", "how", "reason"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, {}, r"not supported \(bitsandbytes\)"),
        ({"quant_method": "gptq"}, {}, r"not supported \(gptq\).*bitsandbytes \(NF4"),
        ({}, {"block": 128}, "has other blocks or levels than bitsandbytes"),
    ],
)
def test_other_formats_are_refused(
    tiny_folder: Path,
    tmp_path: Path,
    settings: dict[str, object],
    how: dict[str, Any],
    reason: str,
) -> None:
    write_by_hand(tiny_folder, tmp_path / "model", "nf4", settings=settings, **how)
    with pytest.raises(ConfigError, match=reason):
        loaded(tmp_path / "model")


def test_another_format_than_the_published_one_is_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    write_by_hand(tiny_folder, tmp_path / "model", "nf4")
    with pytest.raises(ConfigError, match="was published in nf4: remove the key"):
        loaded(tmp_path / "model", quantization="fp8")
    assert loaded(tmp_path / "model", quantization="nf4").quantization == "nf4"


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    write_by_hand(tiny_folder, tmp_path / "model", "nf4")
    file = tmp_path / "model" / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "model.norm.weight"}, file)
    with pytest.raises(ConfigError, match=r"it has no tensor 'model.norm.weight'"):
        loaded(tmp_path / "model")


def test_weights_in_several_files(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    write_by_hand(tiny_folder, tmp_path / "model", name)
    whole = logits(loaded(tmp_path / "model"))
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, inside in parts.items():
        save_file({each: tensors[each] for each in inside}, tmp_path / "model" / part)
    file.unlink()
    index = {each: part for part, inside in parts.items() for each in inside}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (tmp_path / "model" / "model.safetensors.index.json").write_text(text)
    assert torch.equal(logits(loaded(tmp_path / "model")), whole)


def settings(folder: Path, **model: object) -> dict[str, Any]:
    return {
        "model": {"name": str(folder), "precision": "float32"} | model,
        "task": {"name": "arithmetic", "level": 1},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 5},
        # a gradient also where no completion is right
        "objective": {"name": "grpo", "reference_kl_coef": 0.05, "entropy_coef": 0.1},
        "training": {"steps": 4, "learning_rate": 1e-2},
    }


@pytest.mark.parametrize("published", [False, True])
def test_a_run_is_resumed_exactly(tiny_folder: Path, tmp_path: Path, published: bool) -> None:
    folder = tmp_path / "model"
    options: dict[str, object] = {"lora": {"rank": 4}}
    if published:
        write_by_hand(tiny_folder, folder, "nf4")
    else:
        shutil.copytree(tiny_folder, folder)
        options["quantization"] = "nf4"
    results = []
    for name in ("whole", "cut"):
        run = {"folder": str(tmp_path), "name": name, "checkpoint_every": 2, "keep_checkpoints": 9}
        result = trustbatch.train(**settings(folder, **options), run=run)
        if name == "cut":
            shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-4")
            result = trustbatch.train(**settings(folder, **options), run=run)
        assert result.checkpoint is not None
        results.append(Path(result.checkpoint))
    files = [each / ADAPTER_FOLDER / "adapter_model.safetensors" for each in results]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert AutoModelForCausalLM.from_pretrained(results[0]) is not None

    shutil.rmtree(results[1])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = "model.layers.0.mlp.up_proj.weight" + (".absmax" if published else "")
    save_file(tensors | {changed: tensors[changed] * 1.5}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="has adapters for other weights"):
        trustbatch.train(
            **settings(folder, **options),
            run={"folder": str(tmp_path), "name": "cut", "checkpoint_every": 2},
        )


def test_runs_that_can_not_be(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_by_hand(tiny_folder, tmp_path / "model", "nf4")
    run = {"folder": str(tmp_path), "name": "run"}
    with pytest.raises(ConfigError, match=r"can't be trained: add the table \[model.lora\]"):
        trustbatch.train(**settings(tmp_path / "model"), run=run)
    monkeypatch.setattr(policies, "num_ranks", lambda: 2)
    config = parse_config(settings(tmp_path / "model", lora={"rank": 4}))
    with pytest.raises(ConfigError, match="can't be divided over processes"):
        policies.load_model(config)
