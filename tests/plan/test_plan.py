"""Memory before the run: sizes by hand, what makes them smaller, what is said if it is short."""

import math
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import forked
from transformers import Qwen3Config

from trustbatch.api import train
from trustbatch.cli import main
from trustbatch.config import Config, parse_config
from trustbatch.config.cluster import ClusterConfig
from trustbatch.errors import ConfigError, OutOfMemoryError
from trustbatch.models.config import LoraConfig
from trustbatch.plan import Estimator, Lora, Setting, describe_plan, estimate_memory
from trustbatch.plan.advice import _changes, advise
from trustbatch.plan.hardware import Hardware, find_hardware
from trustbatch.plan.memory import GIB
from trustbatch.plan.outline import ModelOutline, measure_activations
from trustbatch.plan.token_counts import cached_tokens
from trustbatch.tasks import build_task
from trustbatch.training.layers import recompute_layers
from trustbatch.training.trainer import Trainer
from trustbatch.types import Prompt
from trustbatch.utils.system_errors import is_shortage

# the tiny model: width 128, MLP 256, 2 layers, 4 heads of 32 for queries and for keys, 16 tokens
LAYER = 4 * 128 * 128 + 3 * 128 * 256 + 2 * 128 + 2 * 32
PRODUCTS = 2 * (4 * 128 * 128 + 3 * 128 * 256)
AROUND = 16 * 128 + 128
PARAMETERS = 2 * LAYER + AROUND
HEAD = 16 * 128


def config_of(folder: Path, **tables: object) -> Config:
    return parse_config(
        {
            "model": {"name": str(folder)},
            "task": {"name": "arithmetic", "level": 1},
            "objective": {"name": "grpo"},
            "rollout": {"prompts_per_step": 64, "samples_per_prompt": 8, "max_tokens": 100},
            **tables,
        }
    )


@pytest.fixture
def config(tiny_folder: Path) -> Config:
    return config_of(tiny_folder)


def gpu(memory: float = 80 * GIB, num: int = 1, available: int = 1) -> Hardware:
    return Hardware(
        is_gpu=True, num_gpus=num, memory=memory, name="cuda", num_available=max(num, available)
    )


def estimator_of(config: Config, hardware: Hardware | None = None) -> Estimator:
    return Estimator.of(config, hardware or gpu(), build_task("arithmetic", seed=0, level=1))


def parts_of(estimator: Estimator, phase: str, setting: Setting | None = None) -> dict[str, float]:
    return {part.name: part.num_bytes for part in estimator.plan(setting).phase(phase).parts}


def test_outline_of_the_tiny_model(tiny_folder: Path) -> None:
    outline = ModelOutline.read(str(tiny_folder))
    assert outline.num_parameters == PARAMETERS == 330_496
    assert outline.largest_layer == LAYER
    assert outline.around_layers == AROUND
    assert outline.decoded_weights == PRODUCTS + HEAD
    assert outline.cached_numbers == 2 * 2 * 4 * 32
    # q, k, v, o: 128 + 128 each; gate, up, down: 128 + 256 each
    assert outline.adapter_parameters(8, None) == 2 * 8 * (4 * 256 + 3 * 384)
    assert outline.adapter_parameters(8, ["q_proj", "down_proj"]) == 2 * 8 * (256 + 384)


def test_what_layers_save_in_bfloat16(tiny_folder: Path) -> None:
    measured = measure_activations(ModelOutline.read(str(tiny_folder)), precision=torch.bfloat16)
    width, mlp, heads, dim = 128, 256, 4, 32
    norm = 4 * width + 4 + 4 * width  # its input, the inverse root, the normed
    inputs = 5 * 2 * width  # of q, k, v, gate and up, each rounded by itself
    # as projected in float32, the inverse root, normed, rotated
    queries = keys = (4 + 2 + 2) * heads * dim + 4 * heads
    attention = 2 * heads * dim + 2 * heads * dim + 4 * heads  # value, output, normalizer
    in_mlp = 4 * 2 * mlp  # gate, silu(gate), up, their product
    assert measured.layer == 2 * norm + inputs + queries + keys + attention + in_mlp
    assert measured.rounded_layer == 2 * (4 * 128 * 128 + 3 * 128 * 256)
    # the id, the last norm, the rotary embedding's cosines and sines
    assert measured.around == 8 + norm + 2 * 4 * dim


def test_float32_has_no_rounded_weights(tiny_folder: Path) -> None:
    measured = measure_activations(ModelOutline.read(str(tiny_folder)), precision=None)
    assert measured.rounded_layer == 0
    assert measured.layer > 7992  # of bfloat16


@pytest.mark.parametrize(
    ("checkpointing", "lora"), [(False, None), (True, None), (False, {}), (False, {"rank": 4})]
)
def test_the_estimate_is_what_autograd_saves_in_a_real_step(
    tiny_folder: Path, checkpointing: bool, lora: dict[str, int] | None
) -> None:
    """On the whole model: the peak of saved bytes with the layers measured one by one."""
    from trustbatch.models.packing.layout import PackedLayout, Segment
    from trustbatch.models.policy import Policy

    policy = Policy.load(str(tiny_folder), device="cpu", precision="bfloat16")
    if lora is not None:
        pytest.importorskip("peft")
        policy.add_adapters(LoraConfig(**lora), seed=0)
    if checkpointing:
        recompute_layers(policy.model)
    num_tokens = 4 * 100
    saved: dict[int, torch.Tensor] = {}
    own = {parameter.data_ptr() for parameter in policy.model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    layout = PackedLayout.of([Segment(100)] * 4)
    ids = torch.zeros(num_tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.hidden_states(ids, layout, torch.arange(num_tokens))
    found = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    model = {"name": str(tiny_folder), "precision": "bfloat16", "lora": lora}
    config = config_of(tiny_folder, model=model)
    estimator = estimator_of(config, gpu())
    setting = replace(Setting.of(config), gradient_checkpointing=checkpointing)
    measured = estimator.activations(setting)
    of_layer = 0.0 if not checkpointing else measured.layer
    expected = num_tokens * (estimator._saved_per_token(setting) - of_layer)
    if checkpointing:
        expected -= num_tokens * 2 * 4 * 32  # cosines and sines: held, but not through autograd
    else:
        expected += 2 * measured.rounded_layer
    assert found == pytest.approx(expected, rel=0.03)


def test_parts_of_one_gpu(config: Config) -> None:
    estimator = estimator_of(config)
    train = parts_of(estimator, "train")
    tokens, longest = 4096, 4 + 100  # a prompt such as "1+2=" has 4
    assert estimator.longest_sequence == longest
    sampled = tokens * 100 / longest
    saved = estimator.activations(Setting.of(config))
    assert train == {
        "parameters": 4 * PARAMETERS,
        "optimizer": 8 * PARAMETERS,
        "gradients": 4 * PARAMETERS,  # of the micro-batches before
        "engine's weights": 2 * (PRODUCTS + HEAD),
        "activations": tokens * (2 * saved.layer + saved.around),
        "rounded weights": 2 * PRODUCTS,
        "log-probs": 1.5 * 4 * sampled * 16 + sampled * 128 * (4 + 4 + 2) + 4 * HEAD,
    }
    generate = parts_of(estimator, "generate")
    # 512 rows of two pages and a scratch page; the pool of the first pages grows once, by half
    first = 1 + 64 + 512
    assert max(1 + 512 * 2, int(first * 1.5)) == 1025
    cache = 1025 * 64 * 2 * 2 * 4 * 32 * 2
    assert generate == {
        "parameters": 4 * PARAMETERS,
        "optimizer": 8 * PARAMETERS,
        "engine's weights": 2 * (PRODUCTS + HEAD),
        "keys and values": pytest.approx(cache * 1.25),  # one of two layers twice, keys or values
        "logits": 2 * 4 * 512 * 16,
        # in the residual stream two of four bytes and two of two; gate, up and their product
        "prompts": 64 * 4 * (128 * 12 + 256 * 6),
    }


def test_shared_prompts_leave_more_of_a_micro_batch_to_sampled_tokens(tiny_folder: Path) -> None:
    """Of 512 tokens, with prompts of 4 tokens and completions of 8."""
    rollout = {"prompts_per_step": 64, "samples_per_prompt": 16, "max_tokens": 8}

    def fraction(tokens: int, **training: Any) -> float:
        config = config_of(tiny_folder, rollout=rollout, training=training)
        return estimator_of(config)._sampled_fraction(tokens)

    assert fraction(512) == 16 * 8 / (4 + 16 * 8)  # all samples of a prompt fit
    assert fraction(4 + 3 * 8 + 7) == 3 * 8 / (4 + 3 * 8)
    assert fraction(12) == fraction(512, share_prompts=False) == 8 / 12


def test_one_micro_batch_has_no_gradients_beside_its_activations(tiny_folder: Path) -> None:
    config = config_of(
        tiny_folder,
        rollout={"prompts_per_step": 4, "samples_per_prompt": 2, "max_tokens": 100},
    )
    assert "gradients" not in parts_of(estimator_of(config), "train")


def test_a_cpu_has_its_own_sizes(config: Config) -> None:
    estimator = estimator_of(config, find_hardware(config, num_gpus=1))
    train = parts_of(estimator, "train")
    assert "rounded weights" not in train
    assert train["engine's weights"] == 4 * (PRODUCTS + HEAD)
    memory = Path("/proc/meminfo")
    if memory.is_file():
        total = re.search(r"MemTotal: +(\d+) kB", memory.read_text())
        assert total is not None
        assert estimator.hardware.capacity == pytest.approx(1024 * int(total[1]), rel=0.01)


def test_reference_second_policies_and_vllm(tiny_folder: Path) -> None:
    objective = {"name": "grpo", "reference_kl_coef": 0.1}
    policies = [{"model": str(tiny_folder), "share": 0.5, "name": "other"}]
    rollout = {"policies": policies}
    train = parts_of(
        estimator_of(config_of(tiny_folder, objective=objective, rollout=rollout)), "train"
    )
    assert train["reference"] == 4 * PARAMETERS
    assert train["second policies"] == 4 * PARAMETERS + 2 * (PRODUCTS + HEAD)
    adapted = config_of(
        tiny_folder, objective=objective, model={"name": str(tiny_folder), "lora": {"rank": 4}}
    )
    assert "reference" not in parts_of(estimator_of(adapted), "train")
    vllm = {"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.3}}
    config = config_of(tiny_folder, rollout=vllm)
    estimator = estimator_of(config)
    assert parts_of(estimator, "train")["vLLM"] == 0.3 * 80 * GIB
    asleep = replace(Setting.of(config), engine_sleeps=True)
    assert "vLLM" not in parts_of(estimator, "train", asleep)
    assert parts_of(estimator, "generate", asleep)["vLLM"] == 0.3 * 80 * GIB
    mixed = parts_of(estimator_of(config_of(tiny_folder, rollout=vllm | rollout)), "train")
    assert "second policies" not in mixed
    assert mixed["vLLM"] == 2 * 0.3 * 80 * GIB
    vllm["vllm"]["devices"] = "1"  # type: ignore[index]
    assert "vLLM" not in parts_of(estimator_of(config_of(tiny_folder, rollout=vllm)), "train")


def test_ranks_divide_all_but_the_engine_s_model(config: Config) -> None:
    estimator = estimator_of(config)
    setting = replace(Setting.of(config), num_gpus=4)
    train = parts_of(estimator, "train", setting)
    assert train["parameters"] == PARAMETERS
    assert train["optimizer"] == 2 * PARAMETERS
    assert train["gradients"] == PARAMETERS
    # a whole model, its products in bfloat16, and the head in bfloat16 besides
    assert train["engine's weights"] == 2 * PRODUCTS + 4 * (PARAMETERS - PRODUCTS) + 2 * HEAD
    assert "rounded weights" not in train
    # three layers and their gradients in bfloat16, two in float32; what is around, twice
    assert train["gathered layers"] == (3 * 2 + 2 + 2 * 4) * LAYER + 2 * 4 * AROUND


def test_each_technique_takes_less(config: Config) -> None:
    estimator = estimator_of(config)
    setting = Setting.of(config)
    before = estimator.plan(setting).phase("train")
    for changes in (
        {"micro_batch_tokens": 2048},
        {"gradient_checkpointing": True},
        {"compiled": True},
        {"eight_bit_optimizer": True},
        {"lora": Lora(rank=4)},
    ):
        assert estimator.plan(replace(setting, **changes)).phase("train").total < before.total
    offloaded = parts_of(estimator, "train", replace(setting, num_gpus=2, cpu_offload=True))
    assert not {"parameters", "optimizer", "gradients"} & set(offloaded)


def test_more_ranks_never_take_more_of_what_is_kept(config: Config) -> None:
    estimator = estimator_of(config)
    totals = [
        sum(
            parts_of(estimator, "train", replace(Setting.of(config), num_gpus=num))[name]
            for name in ("parameters", "optimizer", "gradients")
        )
        for num in (1, 2, 4, 8)
    ]
    assert totals == [16 * PARAMETERS / num for num in (1, 2, 4, 8)]
    caches = [
        parts_of(estimator, "generate", replace(Setting.of(config), num_gpus=num))[
            "keys and values"
        ]
        for num in (1, 2, 4, 8)
    ]
    assert caches == sorted(caches, reverse=True)
    assert caches[0] > 7 * caches[-1]


def test_the_pool_of_pages_grows_as_the_engine_s() -> None:
    # 4 rows that share a prompt of two full pages: 1 + 2 + 4 pages at first, 11 at the end
    few = {"num_prompts": 1, "rows_per_prompt": 4, "prompt_tokens": 128, "paged": True}
    assert cached_tokens(**few, max_tokens=64) == 7 * 64
    assert cached_tokens(**few, max_tokens=65) == 11 * 64  # 10.5 by growth
    # half as much again is more than the fifth page of each row needs: 11, 16, 24
    assert cached_tokens(**few, max_tokens=64 * 4 + 1) == 24 * 64
    assert cached_tokens(**(few | {"paged": False}), max_tokens=65) == 128 + 4 * 65


def test_advice_takes_what_costs_least(config: Config) -> None:
    estimator = estimator_of(config, gpu(available=2))
    setting = Setting.of(config)
    needed = estimator.plan(setting).needed

    def of(limit: float) -> str:
        return str(advise(estimator, setting, limit=limit))

    assert of(0.95 * needed).startswith("set training.micro_batch_tokens = 2048, which saves about")
    few = replace(setting, micro_batch_tokens=2048)
    half, checkpointed = (
        estimator.plan(each).needed for each in (few, replace(few, gradient_checkpointing=True))
    )
    sentence = str(advise(estimator, few, limit=0.99 * half))
    saved = f"{(half - checkpointed) / 2**20:.1f} MiB"
    assert sentence == f"set training.gradient_checkpointing = true, which saves about {saved}"
    nothing = of(1.0)
    assert "that still needs" in nothing
    assert nothing.endswith("choose a smaller model or a device with more memory too")


@pytest.fixture
def large(tmp_path: Path) -> Config:
    """A configuration of the size of Qwen3-0.6B; of the model there is no more than its config."""
    shape = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    shape.save_pretrained(tmp_path / "large")
    return config_of(tmp_path / "large", training={"micro_batch_tokens": 8192})


def test_advice_on_a_larger_model(large: Config) -> None:
    def of(gib: float, **devices: int) -> str:
        hardware = gpu(gib * GIB, **devices)
        estimator = estimator_of(large, hardware)
        setting = Setting.of(large, num_gpus=hardware.num_gpus)
        return str(advise(estimator, setting, limit=hardware.capacity))

    # 30.5 GiB, of which 17.6 are activations and 10 parameters, gradients and states. Half of the
    # activations are saved, and nothing of a slice of logits, which 4,096 tokens fill as well
    assert of(24) == "set training.micro_batch_tokens = 4096, which saves about 8.8 GiB"
    assert of(18).startswith("set training.gradient_checkpointing = true, which saves about 16.")
    assert "train on 2 GPUs (torchrun --nproc-per-node=2)" in of(12, available=4)
    assert of(12).startswith(
        "set training.gradient_checkpointing = true and training.optimizer_offload = true, which"
    )
    assert "model.lora.rank = 16" in of(5)
    assert "cpu_offload" not in of(5)  # of parameters that are divided only
    assert "training.cpu_offload = true" in of(5, num=2)
    assert 'model.lora.rank = 16 and model.quantization = "nf4", which' in of(2)
    assert "nf4" not in of(2, num=2)  # quantized weights can't be divided
    assert "nf4" not in of(2, available=4)
    assert "adamw_8bit" not in of(2)  # adapters have few states
    assert "; that still needs" in of(1.5)
    assert "train on 64 GPUs" in of(1.5, num=2)


def test_the_setting_is_the_configuration_s(tiny_folder: Path) -> None:
    config = config_of(
        tiny_folder,
        model={
            "name": str(tiny_folder),
            "lora": {"rank": 4, "targets": ["q_proj"], "base_precision": "float32"},
        },
        rollout={"max_sequences": 77},
        training={
            "micro_batch_tokens": 99,
            "gradient_checkpointing": True,
            "compile": True,
            "optimizer": "adamw_8bit",
            "cpu_offload": True,
        },
    )
    setting = Setting.of(config, num_gpus=3)
    assert setting == Setting(
        num_gpus=3,
        micro_batch_tokens=99,
        max_sequences=77,
        gradient_checkpointing=True,
        compiled=True,
        eight_bit_optimizer=True,
        cpu_offload=True,
        lora=Lora(rank=4, targets=("q_proj",), base_precision="float32"),
    )
    config = config_of(
        tiny_folder,
        training={
            "gradient_checkpointing": True,
            "activation_offload": True,
            "optimizer_offload": True,
        },
    )
    moved = Setting.of(config)
    assert moved.optimizer_offload
    assert moved.activation_offload


def test_frozen_weights_are_as_large_as_their_precision_says(tiny_folder: Path) -> None:
    """Adapters of rank 4 on the query projections of two layers: 4 * (128 + 128) each."""
    config = config_of(tiny_folder, model={"name": str(tiny_folder), "lora": {"rank": 4}})
    estimator = estimator_of(config)
    adapters, norms = 2 * 4 * 256, PARAMETERS - PRODUCTS - HEAD

    def of(phase: str = "train", **changes: Any) -> dict[str, float]:
        lora = Lora(rank=4, targets=("q_proj",), base_precision=changes.pop("base", "auto"))
        return parts_of(estimator, phase, replace(Setting.of(config), lora=lora, **changes))

    assert of()["parameters"] == 2 * (PRODUCTS + HEAD) + 4 * (norms + adapters)
    assert of()["optimizer"] == 8 * adapters
    assert of()["engine's weights"] == 2 * adapters  # there is no other copy
    assert of(base="float32")["parameters"] == 4 * (PARAMETERS + adapters)
    assert of(base="float32")["engine's weights"] == 2 * (PRODUCTS + HEAD + adapters)
    # half a byte each, and a scale of four for 64 of them; the MLP's 256 x 128 are the largest
    small = of(quantization="nf4")
    assert small["parameters"] == PRODUCTS * 9 / 16 + 2 * HEAD + 4 * (norms + adapters)
    assert small["engine's weights"] == 2 * adapters
    assert small["one layer, dequantized"] == 2 * 128 * 256
    # a scale for each of the outputs: q, k, v, o, gate and up have 128 inputs, down has 256
    rows = 2 * (4 * 128 + 2 * 256 + 128)
    int8 = of(quantization="int8")
    assert int8["parameters"] == pytest.approx(
        PRODUCTS + 4 * rows + 2 * HEAD + 4 * (norms + adapters)
    )


def test_a_cache_in_8_bits_has_a_scale_for_each_key_and_value(config: Config) -> None:
    estimator = estimator_of(config)
    of = [
        parts_of(estimator, "generate", replace(Setting.of(config), fp8_cache=is_small))
        for is_small in (False, True)
    ]
    # dimension 32: 64 bytes, or 32 and a scale of four
    assert of[1]["keys and values"] == pytest.approx(of[0]["keys and values"] * 36 / 64)


def test_what_is_in_host_memory(config: Config) -> None:
    estimator = estimator_of(config)
    setting = replace(Setting.of(config), gradient_checkpointing=True)
    assert "optimizer" not in parts_of(estimator, "train", replace(setting, optimizer_offload=True))
    layers = estimator.outline.num_layers
    assert layers == 2  # as many inputs as are being written, so that nothing is gained here
    before, after = (
        parts_of(estimator, "train", replace(setting, activation_offload=moved))["activations"]
        for moved in (False, True)
    )
    assert before == after


def test_few_inputs_of_many_layers_stay_on_the_device(large: Config) -> None:
    """Of 28 layers three: the one that is read, and two that are written or read ahead."""
    estimator = estimator_of(large)
    setting = replace(Setting.of(large), gradient_checkpointing=True)
    before, after = (
        parts_of(estimator, "train", replace(setting, activation_offload=moved))["activations"]
        for moved in (False, True)
    )
    assert before - after == pytest.approx(8192 * 4 * 1024 * (28 - 3))


def test_who_has_one_gpu_is_not_told_to_get_more(large: Config) -> None:
    def numbers(hardware: Hardware) -> list[int]:
        setting = Setting.of(large, num_gpus=hardware.num_gpus)
        changes = _changes(estimator_of(large, hardware), setting)
        return [change.value for change in changes if change.field == "num_gpus"]

    assert numbers(gpu()) == []
    assert numbers(gpu(available=4)) == [2, 4, 8, 16, 32, 64]


def test_a_limit_is_a_smaller_gpu(config: Config) -> None:
    model = config.model.model_copy(update={"gpu_memory_limit_gib": 24.0})
    limited = config.model_copy(update={"model": model})
    hardware = find_hardware(limited, gpu_memory=80 * GIB)
    assert hardware.capacity == pytest.approx(24 * GIB * 0.96 - GIB)
    assert hardware.name == "cuda (80.0 GiB) limited to 24.0 GiB"
    assert find_hardware(limited, gpu_memory=16 * GIB).memory == 16 * GIB
    assert not find_hardware(limited).is_gpu or torch.cuda.is_available()


def test_few_sequences_must_have_room_for_their_keys_and_values(config: Config) -> None:
    """Eight of 104 tokens, 512 numbers of two bytes each, in one of two layers half again."""
    phase = estimator_of(config).plan().phase("generate")
    least = 8 * 104 * 512 * 2 * 1.25
    others = sum(part.num_bytes for part in phase.parts if part.name != "keys and values")
    assert phase.needed == pytest.approx(others + least)  # 256 prompt tokens are less than 2,048


def test_advice_for_one_phase(config: Config) -> None:
    estimator = estimator_of(config)
    setting = Setting.of(config)
    limit = 0.99 * estimator.plan(setting).phase("generate").needed
    advice = advise(estimator, setting, limit=limit, phase="generate")
    assert "micro_batch_tokens" not in str(advice)


def test_the_plan_says_what_to_change(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        config.to_toml().replace("micro_batch_tokens = 4096", "micro_batch_tokens = 200000")
    )
    # 51,200 tokens of 17 KB are nearly a GiB; of the smallest GPU nothing is left for torch
    plan = ["train", str(file), "--dry-run", "--gpu-memory"]
    assert main([*plan, "1"]) == 0
    assert "does not fit: needs " in capsys.readouterr().out
    assert main([*plan, "1.5"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "set training.micro_batch_tokens = 25000, which saves about" in printed
    assert main([*plan, "80", "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    assert "parameters on 8 x cuda (80.0 GiB)" in printed
    assert "fits: needs" in printed
    assert "on each GPU, with prompts of up to 4 tokens" in printed
    assert main(["train", str(file), "--gpus", "8"]) == 2
    assert "are for --dry-run" in " ".join(capsys.readouterr().err.split())
    if not torch.cuda.is_available():
        assert main(["train", str(file), "--dry-run", "--gpus", "8"]) == 2
        assert "--gpus 8 needs --gpu-memory" in capsys.readouterr().err


def test_a_cache_that_is_larger_than_the_gpu_makes_sequences_wait(tiny_folder: Path) -> None:
    config = config_of(
        tiny_folder,
        rollout={
            "prompts_per_step": 64,
            "samples_per_prompt": 64,
            "max_tokens": 1000,
            "max_sequences": 4096,
        },
    )
    printed = describe_plan(config, hardware=gpu(4 * GIB))
    assert "fits: needs" in printed
    assert "some sequences wait" in printed
    assert "prompts of up to 256 tokens (assumed)" in printed


def test_estimate_from_python(config: Config) -> None:
    plan = estimate_memory(config, num_gpus=2, gpu_memory=80 * GIB)
    assert plan.fits
    assert plan.num_gpus == 2
    assert plan.needed == max(phase.needed for phase in plan.phases)
    assert math.isclose(plan.capacity, 80 * GIB * 0.96 - GIB)


def test_a_cluster_has_trainers_without_an_engine_and_engines_without_a_trainer(
    tiny_folder: Path,
) -> None:
    config = config_of(tiny_folder, cluster={"trainers": 6, "engines": 2})
    hardware = find_hardware(config, gpu_memory=80 * GIB)
    assert (hardware.num_gpus, hardware.num_available) == (6, 8)
    estimator = estimator_of(config, hardware)
    train, generate = parts_of(estimator, "train"), parts_of(estimator, "generate")
    assert train["parameters"] == pytest.approx(4 * PARAMETERS / 6)
    assert train["optimizer"] == pytest.approx(8 * PARAMETERS / 6)
    assert not {"engine's parameters", "engine's weights", "keys and values"} & set(train)
    assert generate["engine's parameters"] == 4 * PARAMETERS
    assert generate["engine's weights"] == 2 * (PRODUCTS + HEAD)
    assert generate["logits"] == 2 * 4 * 256 * 16  # half of the 512 rows
    assert not {"parameters", "optimizer"} & set(generate)

    crowded = config_of(tiny_folder, cluster={"engines": 4, "engine_gpus": 0.5})
    two = parts_of(estimator_of(crowded, find_hardware(crowded, gpu_memory=80 * GIB)), "generate")
    assert two["engine's parameters"] == 2 * 4 * PARAMETERS
    alone = parts_of(estimator_of(crowded.model_copy(update={"cluster": ClusterConfig()})), "train")
    assert alone["parameters"] == 4 * PARAMETERS  # on the only GPU all is there at once
    assert alone["engine's parameters"] == 2 * 4 * PARAMETERS
    assert "published weights" not in alone  # they go through shared memory


@pytest.mark.parametrize(
    ("method", "engine", "share", "num_bytes"),
    [
        ("auto", "native", 0.19, 3 * 4 * PARAMETERS),  # lag 1: the newest two, and one that goes
        ("auto", "vllm", 0.19, 3 * 2 * PARAMETERS),
        ("auto", "native", 0.21, None),  # too much of the GPU
        ("process_group", "native", 0.21, 3 * 4 * PARAMETERS),
        ("shared_memory", "native", 0.19, None),
    ],
)
def test_versions_that_wait_for_engines_on_the_first_trainer_s_gpu(
    tiny_folder: Path, method: str, engine: str, share: float, num_bytes: float | None
) -> None:
    config = config_of(
        tiny_folder,
        cluster={"trainers": 6, "engines": 2, "weight_transfer": method},
        rollout={"engine": engine},
    )
    memory = 3 * (4 if engine == "native" else 2) * PARAMETERS / share
    estimator = estimator_of(config, find_hardware(config, gpu_memory=memory))
    assert parts_of(estimator, "train").get("published weights") == num_bytes


def test_the_policy_that_vllm_copies_in_a_cluster_is_in_host_memory(tiny_folder: Path) -> None:
    config = config_of(
        tiny_folder, cluster={"trainers": 6, "engines": 2}, rollout={"engine": "vllm"}
    )
    parts = parts_of(estimator_of(config, find_hardware(config, gpu_memory=80 * GIB)), "generate")
    assert parts == {"vLLM": pytest.approx(0.4 * 80 * GIB)}


def test_the_plan_of_the_paper_s_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-4B, of which there is no more than its config, with six trainers and two engines."""
    shape = Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    shape.save_pretrained(tmp_path / "large")
    layout = {"trainers": 6, "engines": 2, "reward_workers": 2}
    config = config_of(
        tmp_path / "large",
        cluster=layout,
        training={"micro_batch_tokens": 8192, "gradient_checkpointing": True},
        run={"folder": str(tmp_path / "runs")},
    )
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert main(["train", str(file), "--dry-run", "--gpu-memory", "80"]) == 0
    printed = capsys.readouterr().out
    assert "4,022,468,096 parameters on 8 x cuda (80.0 GiB)" in printed
    assert "6 trainers with 1 CPU and 1 GPU each\n" in printed
    assert "2 engines with 1 CPU and 1 GPU each\n" in printed
    assert "2 reward workers with 1 CPU each\n" in printed
    assert "in total 8 of Ray's 8 GPUs\n" in printed
    # 4.02e9 parameters: 4 and 8 bytes of each over six trainers; 4 bytes of all in an engine
    assert "parameters 2.5 GiB, optimizer 5.0 GiB, gathered" in printed
    assert "engine's parameters 15.0 GiB, engine's weights 7.5 GiB, keys and values" in printed
    assert "generate on the GPU of each engine, train on the GPU of each trainer" in printed
    assert "fits: needs" in printed


def test_a_cluster_is_planned_for_where_it_can_not_be(tiny_folder: Path) -> None:
    config = config_of(tiny_folder, cluster={"trainers": 6, "engines": 2})
    seven = find_hardware(config, num_gpus=7, gpu_memory=80 * GIB)
    assert "Ray has 7 GPU in all, and the run needs 8" in describe_plan(config, hardware=seven)
    config = config_of(
        tiny_folder, cluster={"engines": 3}, model={"name": str(tiny_folder), "device": "cpu"}
    )
    printed = describe_plan(config)
    assert "1 trainer, the process that is started\n" in printed
    assert "3 engines with 1 CPU each\n" in printed
    assert "generate in the process of each engine" in printed


def test_advice_for_a_cluster_is_more_trainers(large: Config) -> None:
    cluster = ClusterConfig(trainers=2, engines=2)
    config = large.model_copy(update={"cluster": cluster})
    hardware = find_hardware(config, num_gpus=8, gpu_memory=8 * GIB)
    setting = Setting.of(config, num_gpus=hardware.num_gpus)
    assert str(advise(estimator_of(config, hardware), setting, limit=hardware.capacity)) == (
        "set training.micro_batch_tokens = 4096, training.gradient_checkpointing = true and "
        "cluster.trainers = 4, which saves about 19.1 GiB"
    )
    direct = cluster.model_copy(update={"weight_transfer": "process_group"})
    config = large.model_copy(update={"cluster": direct})
    setting = Setting.of(config, num_gpus=hardware.num_gpus)
    advice = str(advise(estimator_of(config, hardware), setting, limit=hardware.capacity))
    assert advice.startswith('set cluster.weight_transfer = "shared_memory", training.micro')


class Failing:
    """A task that fails once, while a batch is sampled."""

    name = "failing"

    def __init__(self, error: Exception) -> None:
        self.errors = [error]

    def prompt(self, index: int) -> Prompt:
        if index == 31 and self.errors:
            raise self.errors.pop()
        return build_task("arithmetic", seed=0, level=1).prompt(index)

    def grade(self, prompt: Prompt, completion: str) -> float:
        return 0.0


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("in the words of another version"), MemoryError()],
)
def test_no_memory_while_sampling(tiny_folder: Path, tmp_path: Path, error: Exception) -> None:
    sentence = (
        r"ran out in the generate phase with [\d.]+ [MG]iB in use: "
        r"it needs about [\d.]+ MiB of [\d.]+ GiB, so (set|choose) "
    )
    with pytest.raises(OutOfMemoryError, match=sentence):
        train(
            model=tiny_folder,
            task=Failing(error),
            rollout={"prompts_per_step": 32, "max_tokens": 4},
            run={"folder": str(tmp_path)},
        )


def test_other_errors_stay_as_they_are(tiny_folder: Path, tmp_path: Path) -> None:
    assert not is_shortage(RuntimeError("shapes do not match"))
    with pytest.raises(ConfigError, match="shapes do not match; fix it, and the same command"):
        train(
            model=tiny_folder,
            task=Failing(RuntimeError("shapes do not match")),
            rollout={"prompts_per_step": 32, "max_tokens": 4},
            run={"folder": str(tmp_path)},
        )


def train_with_little_memory(file: str) -> int:
    """Train in a process that may have little more than it has before the first step."""
    train = Trainer.train

    def limited(*arguments: Any, **options: Any) -> Any:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20,) * 2)
        return train(*arguments, **options)

    Trainer.train = limited
    return main(["train", file])


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs Linux's /proc")
def test_a_machine_without_memory(tiny_folder: Path, tmp_path: Path) -> None:
    """A real refusal of the allocator, in a process that may have little more than before."""
    config = config_of(
        tiny_folder,
        rollout={
            "prompts_per_step": 128,
            "samples_per_prompt": 8,
            "max_tokens": 32,
        },
        training={"steps": 1, "micro_batch_tokens": 1_000_000},
        run={"folder": str(tmp_path)},
    )
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    with forked.process(train_with_little_memory, str(file)) as process:
        _, errors = process.communicate()
    said = " ".join(errors.split())
    assert process.returncode == 2, said
    assert "Traceback" not in said
    assert "error: Memory ran out in the train phase with " in said
    assert "so set training.micro_batch_tokens = " in said
    assert "which saves about" in said
