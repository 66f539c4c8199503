"""LoRA: only adapters are trained, and whatever leaves the trainer is an ordinary model."""

import copy
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tests.support.training_cases import policy_logp, sample_sequences, train
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import trustbatch
from trustbatch.errors import CheckpointError, ConfigError
from trustbatch.models import loading
from trustbatch.models.config import LoraConfig
from trustbatch.models.policy import ADAPTER_FOLDER, Policy
from trustbatch.models.rounding import round_weights
from trustbatch.rollout.native.decoder import LlamaDecoder
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.tasks import build_task
from trustbatch.training.canary import Canary

peft = pytest.importorskip("peft")


@pytest.fixture
def adapted(tiny_folder: Path) -> Policy:
    """The tiny model with adapters that have been trained a little."""
    policy = with_adapters(tiny_folder)
    train(policy, sample_sequences(policy), num_steps=3)
    return policy


def with_adapters(folder: Path, *, precision: str = "float32", **options: object) -> Policy:
    config = LoraConfig.model_validate({"rank": 4} | options)
    policy = Policy.load(str(folder), device="cpu", precision=precision, lora=config)
    policy.add_adapters(config, seed=0)
    return policy


def logits(policy: Policy, model: torch.nn.Module | None = None) -> torch.Tensor:
    ids = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9]])
    with torch.no_grad():
        return policy.logits(ids, num_last=8) if model is None else model(input_ids=ids).logits


def test_only_adapters_are_trained(tiny_folder: Path, adapted: Policy) -> None:
    untrained = with_adapters(tiny_folder)
    before = dict(untrained.model.named_parameters())
    trained = {name for name, _ in adapted.trained_parameters()}
    assert len(trained) == 2 * 7 * adapted.model.config.num_hidden_layers
    for name, parameter in adapted.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in trained), name


def test_adapters_start_as_nothing_and_from_the_seed(tiny_folder: Path, policy: Policy) -> None:
    first = with_adapters(tiny_folder)
    torch.rand(1)  # elsewhere in the random numbers of the process
    second = with_adapters(tiny_folder)
    assert torch.equal(logits(first), logits(policy))
    for (name, one), (_, other) in zip(
        first.trained_parameters(), second.trained_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


def test_an_engine_gets_merged_weights_by_the_names_of_the_plain_model(
    policy: Policy, adapted: Policy
) -> None:
    merged = dict(adapted.named_weights())
    assert [*merged] == [name for name, _ in policy.named_weights()]
    before = logits(policy)
    NativeEngine(policy, seed=0).load_weights(merged.items(), version=1)
    torch.testing.assert_close(logits(policy), logits(adapted), rtol=0, atol=1e-5)
    assert not torch.allclose(logits(policy), before, atol=1e-3)


def test_the_native_engine_samples_from_what_is_trained(adapted: Policy) -> None:
    engine = NativeEngine(adapted, seed=1)
    assert isinstance(engine._batch.decoder, LlamaDecoder)
    task = build_task("arithmetic", seed=0)
    prompts = [task.prompt(index) for index in range(4)]
    canary = Canary(engine, adapted, prompts, max_tokens=8, logprob_mode="processed", every=1)
    for version in (1, 2):
        sequences = sample_sequences(adapted, engine=engine)
        train(adapted, sequences, num_steps=2)
        engine.load_weights(adapted.named_weights(), version=version)
        canary.check(version)
        sampled = sample_sequences(adapted, engine=engine)
        recorded = torch.cat([s.completion.behavior_logp for s in sampled])
        expected = policy_logp(adapted, sampled)
        torch.testing.assert_close(recorded, expected, rtol=0, atol=1e-5)


def test_a_saved_model_is_an_ordinary_one(adapted: Policy, tmp_path: Path) -> None:
    adapted.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "lora" not in json.dumps([*loaded.state_dict()])
    torch.testing.assert_close(logits(adapted, loaded), logits(adapted), rtol=0, atol=1e-5)


def test_peft_loads_the_saved_adapters(adapted: Policy, tiny_folder: Path, tmp_path: Path) -> None:
    adapted.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / ADAPTER_FOLDER)
    torch.testing.assert_close(logits(adapted, loaded), logits(adapted), rtol=0, atol=1e-6)


def test_adapters_are_loaded_again_bit_for_bit(
    adapted: Policy, tiny_folder: Path, tmp_path: Path
) -> None:
    adapted.save(tmp_path)
    again = with_adapters(tiny_folder)
    assert again.adapters is not None
    again.adapters.load(tmp_path / ADAPTER_FOLDER)
    assert torch.equal(logits(again), logits(adapted))
    other = with_adapters(tiny_folder, rank=2)
    assert other.adapters is not None
    with pytest.raises(ConfigError, match="another model, rank or choice of layers"):
        other.adapters.load(tmp_path / ADAPTER_FOLDER)
    with pytest.raises(ConfigError, match="can't be read"):
        other.adapters.load(tmp_path)


def test_the_reference_is_the_model_without_adapters(adapted: Policy, policy: Policy) -> None:
    reference = adapted.without_adapters()
    assert torch.equal(logits(reference), logits(policy))
    assert not torch.allclose(logits(adapted), logits(policy), atol=1e-3)
    assert all(parameter.requires_grad for _, parameter in adapted.trained_parameters())


def test_a_reference_of_its_own_gives_the_same_update(tiny_folder: Path, policy: Policy) -> None:
    sequences = sample_sequences(policy)
    results = []
    for reference in (policy.freeze(), None):
        trained = with_adapters(tiny_folder)
        train(
            trained,
            sequences,
            num_steps=3,
            objective={"name": "grpo", "reference_kl_coef": 0.1},
            reference=reference or trained.without_adapters(),
        )
        results.append(torch.cat([p.flatten() for _, p in trained.trained_parameters()]))
    assert torch.equal(*results)


def test_some_layers_only(tiny_folder: Path) -> None:
    policy = with_adapters(tiny_folder, targets=["q_proj", "v_proj"])
    names = {name.split(".")[4] for name, _ in policy.trained_parameters()}
    assert names == {"q_proj", "v_proj"}
    assert isinstance(NativeEngine(policy, seed=0)._batch.decoder, LlamaDecoder)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_projection", "self_attn"])
def test_targets_that_can_not_have_adapters(tiny_folder: Path, target: str) -> None:
    with pytest.raises(ConfigError, match=rf"{target}.*choose from down_proj, gate_proj"):
        with_adapters(tiny_folder, targets=[target])


@pytest.fixture
def published_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """The tiny model in bfloat16, as models on the hub are."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16)
    shutil.copytree(tiny_folder, tmp_path / "published")
    model.save_pretrained(tmp_path / "published")
    return tmp_path / "published"


def test_a_bfloat16_base(tiny_folder: Path, published_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"set model.precision to bfloat16"):
        with_adapters(tiny_folder, base_precision="bfloat16")
    assert with_adapters(tiny_folder).model.lm_head.weight.dtype == torch.float32
    small = with_adapters(published_folder, precision="bfloat16")
    wide = with_adapters(published_folder, precision="bfloat16", base_precision="float32")
    layer = small.model.model.layers[0].mlp.down_proj
    for module in (layer, small.model.model.embed_tokens, small.model.lm_head):
        assert module.weight.dtype == torch.bfloat16
    assert wide.model.lm_head.weight.dtype == torch.float32
    assert small.model.model.norm.weight.dtype == torch.float32
    for (_, one), (_, other) in zip(
        small.trained_parameters(), wide.trained_parameters(), strict=True
    ):
        assert one.dtype == torch.float32
        with torch.no_grad():
            other.copy_(one)
    sequences = sample_sequences(wide.without_adapters())
    for each in (small, wide):
        train(each, sequences, num_steps=2)
    # rounding changes nothing: neither published weights, nor what autocast rounds anyway
    assert torch.equal(policy_logp(small, sequences), policy_logp(wide, sequences))
    assert torch.equal(logits(small), logits(wide))


def test_published_weights_are_never_in_float32(
    published_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that fits in bfloat16 may not fit in float32, not even in host memory."""
    stored: set[torch.dtype] = set()

    def note(model: torch.nn.Module) -> None:
        stored.update(parameter.dtype for parameter in model.parameters())
        round_weights(model)

    monkeypatch.setattr(loading, "round_weights", note)
    Policy.load(str(published_folder), device="cpu", precision="bfloat16", lora=LoraConfig())
    assert stored == {torch.bfloat16}


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_is_loaded_in_bfloat16(tiny_folder: Path, tmp_path: Path, tied: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, tie_word_embeddings=tied)
    with torch.no_grad():
        model.model.norm.weight.fill_(1 + 2**-12)  # bfloat16 would round it to 1
    shutil.copytree(tiny_folder, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    policy = Policy.load(
        str(tmp_path / "model"), device="cpu", precision="bfloat16", lora=LoraConfig()
    )
    embedding, head = policy.model.model.embed_tokens, policy.model.lm_head
    assert embedding.weight.dtype == head.weight.dtype == torch.bfloat16
    assert (embedding.weight.data_ptr() == head.weight.data_ptr()) == tied
    assert policy.model.model.norm.weight.unique().tolist() == [1 + 2**-12]
    with policy.autocast():
        assert embedding(torch.tensor([3])).dtype == torch.float32  # the residual stream
    assert policy.packs
    assert policy.head is head


def test_a_missing_package_is_a_sentence(
    tiny_folder: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'trustbatch\[lora\]'"):
        with_adapters(tiny_folder)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"pip install 'trustbatch\[torchao\]'"):
        train(policy, [], num_steps=0, optimizer="adamw_8bit")


def test_a_copied_policy_has_adapters_of_its_own(adapted: Policy) -> None:
    copied = copy.deepcopy(adapted)
    before = logits(adapted)
    train(copied, sample_sequences(adapted), num_steps=1)
    assert torch.equal(logits(adapted), before)
    assert not torch.equal(logits(copied), before)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_with_adapters_is_resumed_exactly(
    tiny_folder: Path, tmp_path: Path, precision: str
) -> None:
    """Adapters are the state: the merged weights beside them are rounded."""
    settings = {
        "model": {"name": str(tiny_folder), "precision": precision, "lora": {"rank": 4}},
        "task": {"name": "arithmetic", "level": 1},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 5},
        # a gradient also where no completion is right
        "objective": {"name": "grpo", "reference_kl_coef": 0.05, "entropy_coef": 0.1},
        "training": {"steps": 4, "learning_rate": 1e-2},
    }
    results = []
    for name in ("whole", "cut"):
        run = {"folder": str(tmp_path), "name": name, "checkpoint_every": 2, "keep_checkpoints": 9}
        result = trustbatch.train(**settings, run=run)
        if name == "cut":
            for path in sorted((tmp_path / "cut" / "checkpoints" / "step-4").rglob("*")):
                if path.is_file():
                    path.unlink()
            (tmp_path / "cut" / "checkpoints" / "step-4").rename(tmp_path / "gone")
            result = trustbatch.train(**settings, run=run)
        assert result.checkpoint is not None
        results.append(Path(result.checkpoint) / ADAPTER_FOLDER / "adapter_model.safetensors")
    assert results[0].read_bytes() == results[1].read_bytes()


def test_a_run_does_not_go_on_with_other_frozen_weights(tiny_folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_folder, base)

    def run(steps: int) -> None:
        trustbatch.train(
            model={"name": str(base), "lora": {"rank": 2}},
            task="arithmetic",
            rollout={"prompts_per_step": 1, "samples_per_prompt": 2, "max_tokens": 2},
            training={"steps": steps},
            run={"name": "run", "folder": str(tmp_path / "runs"), "checkpoint_every": 1},
        )

    run(2)
    shutil.rmtree(tmp_path / "runs" / "run" / "checkpoints" / "step-2")
    other = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.model.norm.weight.mul_(1.001)
    other.save_pretrained(base)
    with pytest.raises(CheckpointError, match="has adapters for other weights"):
        run(2)


def test_layers_that_could_not_be_merged_are_refused(policy: Policy) -> None:
    """GPT-2's are not nn.Linear: PEFT would adapt them, and nobody would merge them."""
    vocabulary = policy.model.config.vocab_size
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=vocabulary, eos_token_id=1)
    other = Policy(GPT2LMHeadModel(config), policy.tokenizer, name="gpt2", precision="float32")
    with pytest.raises(ConfigError, match="PEFT would adapt other layers"):
        other.add_adapters(LoraConfig(rank=2), seed=0)


def test_buffers_of_the_model_are_saved_with_merged_weights(tiny_folder: Path) -> None:
    policy = Policy.load(str(tiny_folder), device="cpu", precision="float32")
    policy.model.model.register_buffer("correction", torch.tensor([5.0, 0.0]))
    policy.add_adapters(LoraConfig(rank=2), seed=0)
    assert policy.adapters is not None
    state = dict(policy.adapters.merged_state())
    assert state["model.correction"].tolist() == [5.0, 0.0]
    assert "model.layers.0.self_attn.q_proj.weight" in state
    assert not any("lora" in name or "base_layer" in name for name in state)
