"""Any decoder-only checkpoint: other architectures, chat templates, what can't be loaded."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import trustbatch
from trustbatch.errors import ConfigError
from trustbatch.models.loading import count_parameters
from trustbatch.models.policy import Policy
from trustbatch.models.tiny import build_tokenizer
from trustbatch.plan import describe_plan
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.types import GenerationRequest, Prompt, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=16, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1
        )
        config.eos_token_id = 1
        return GPT2LMHeadModel(config)
    if kind == "gemma2":
        # soft-capped logits, and attention windows on every other layer
        return Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=16, sliding_window=4))
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5))
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mistral"])
def test_other_architectures_sample_and_train(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    make_model(kind).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    result = trustbatch.train(
        model=folder,
        task={"name": "arithmetic", "level": 2},
        rollout={"prompts_per_step": 3, "samples_per_prompt": 4, "max_tokens": 8},
        training={"steps": 2, "learning_rate": 1e-3},
        run={"folder": str(tmp_path)},
    )
    # engine and trainer compute the same distribution by different ways through the model
    assert max(line["one_minus_ess"] for line in result.metrics) < 1e-8
    assert result.metrics[-1]["steps/skipped"] == 0


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    build_tokenizer().save_pretrained(tmp_path / "mamba")
    with pytest.raises(ConfigError, match="keeps a recurrent state"):
        Policy.load(str(tmp_path / "mamba"))


def test_encoders_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
    model = BertLMHeadModel(BertConfig(**shape, initializer_range=0.5))
    model.save_pretrained(tmp_path / "bert")
    build_tokenizer().save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match="attends to later tokens"):
        Policy.load(str(tmp_path / "bert"))


def test_chat_template_is_used_where_there_is_one(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = (
        "{% for message in messages %}={{ message['content'] }}={% endfor %}"
        "{% if add_generation_prompt %}+{% endif %}"
    )
    policy = Policy.load(str(tiny_folder))
    prompt = Prompt(id="p", text="12", answer="")
    assert policy.tokenizer.decode(policy.encode(prompt)) == "12"
    templated = Policy(policy.model, tokenizer, name="x", precision="float32")
    assert tokenizer.decode(templated.encode(prompt)) == "=12=+"


def test_stop_tokens_come_from_tokenizer_and_generation_config(policy: Policy) -> None:
    policy.model.generation_config.eos_token_id = [1, 7]
    stops = Policy(policy.model, policy.tokenizer, name="x", precision="float32").stop_token_ids
    assert stops == (1, 7)
    request = GenerationRequest(
        prompt_id="p",
        token_ids=policy.encode(Prompt(id="p", text="1+1=", answer="")),
        num_samples=50,
        sampling=SamplingParams(max_tokens=20, stop_token_ids=stops),
    )
    last = {int(c.token_ids[-1]) for c in NativeEngine(policy, seed=0).generate([request])}
    assert {1, 7} <= last


def test_what_cannot_be_found_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not be found: give a local folder"):
        count_parameters("no/such-model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="could not be loaded"):
        Policy.load(str(tmp_path))


def test_parameters_are_counted_without_loading(tiny_folder: Path, policy: Policy) -> None:
    counted, config = count_parameters(str(tiny_folder))
    assert counted == sum(p.numel() for p in policy.model.parameters())
    assert config.vocab_size == 16


def test_plan_says_where_a_run_continues(tiny_folder: Path, tmp_path: Path) -> None:
    from trustbatch.config import parse_config

    config = parse_config(
        {
            "model": {"name": str(tiny_folder)},
            "task": {"name": "arithmetic"},
            "run": {"folder": str(tmp_path)},
        }
    )
    assert "continues" not in describe_plan(config)
    (tmp_path / "run" / "checkpoints" / "step-5").mkdir(parents=True)
    assert "continues from step-5" in describe_plan(config)


def test_a_hub_name_without_a_network_is_refused_in_seconds() -> None:
    """The hub's client alone would try again for minutes; here its address does not exist."""
    code = (
        "from trustbatch.models.policy import Policy\n"
        "from trustbatch.errors import ConfigError\n"
        "try:\n    Policy.load('no-such/model')\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "https://hub.invalid"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=45,
        check=True,
    )
    assert done.stdout.startswith("model.name = 'no-such/model' could not be loaded")
    assert "Retrying" not in done.stderr
