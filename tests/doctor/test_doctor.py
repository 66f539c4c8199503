"""The doctor names planted faults, one at a time, and leaves a healthy stack in peace.

Each fault is planted around a real native engine on a real model, so that what reaches the doctor
is what a faulty engine would deliver.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from trustbatch.build.policies import load_policy
from trustbatch.build.session import configured_task
from trustbatch.cli import main
from trustbatch.config import Config, parse_config
from trustbatch.doctor.examine import Examination, examine
from trustbatch.doctor.verdict import Status, Verdict, judge
from trustbatch.models.packing.layout import PackedLayout
from trustbatch.models.policy import Policy
from trustbatch.models.tiny import build_tokenizer
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.rollout.sampling import sampling_logprobs
from trustbatch.types import Completion, GenerationRequest


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 96 tokens whose distributions are neither flat nor certain."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(80)])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.25,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    folder = tmp_path_factory.mktemp("models") / "peaked"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, precision: str = "float32") -> Policy:
    return Policy.load(str(folder), device="cpu", precision=precision)


def config_of(folder: Path, **tables: Any) -> Config:
    tree: dict[str, Any] = {
        "model": {"name": str(folder)},
        "task": {"name": "arithmetic"},
        "rollout": {"max_tokens": 12},
    }
    for name, table in tables.items():
        tree[name] = {**tree[name], **table} if isinstance(tree.get(name), dict) else table
    return parse_config(tree)


def diagnose(config: Config, policy: Policy, engine: Any) -> tuple[Verdict, Examination]:
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    examination = examine(
        config, policy, engine, configured_task(config), num_tokens=1500, say=lambda _: None
    )
    for value, parameter in zip(before, policy.model.parameters(), strict=True):
        assert torch.equal(value, parameter), "the doctor changed the patient"
    return judge(examination, config), examination


def found(verdict: Verdict) -> tuple[set[str], set[str]]:
    return set(verdict.causes(Status.FAULT)), set(verdict.causes(Status.CONFIGURED))


def words(verdict: Verdict) -> str:
    return " ".join(verdict.sentences)


class Rewriting(NativeEngine):
    """Samples as requested, but records log-probs as if other settings had been requested."""

    recorded: dict[str, Any]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Evaluate the sampled tokens again under the other settings."""
        completions = super().generate(requests)
        slots = [request for request in requests for _ in range(request.num_samples)]
        return [
            replace(completion, behavior_logp=self._evaluate(request, completion))
            for request, completion in zip(slots, completions, strict=True)
        ]

    @torch.no_grad()
    def _evaluate(self, request: GenerationRequest, completion: Completion) -> Tensor:
        ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
        logits = self.policy.model(input_ids=ids).logits[0, len(request.token_ids) - 1 : -1]
        logp = sampling_logprobs(logits, replace(request.sampling, **self.recorded))
        return logp.gather(-1, completion.token_ids[:, None]).squeeze(-1)


class Misanchored(NativeEngine):
    """Samples and records as asked, but has another anchor."""

    def __init__(self, *arguments: Any, wrong: Callable[[Completion], dict[str, Any]]) -> None:
        super().__init__(*arguments, seed=0)
        self.wrong = wrong

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Change what was recorded of the anchor, where it was."""
        return [
            replace(completion, **self.wrong(completion))
            if completion.anchor_logp is not None
            else completion
            for completion in super().generate(requests)
        ]


class Deaf(NativeEngine):
    """Ignores weight updates, but counts the versions."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over the number only."""
        self._version = version


class Perturbed(NativeEngine):
    """One layer is wrong again after every update."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights, then spoil one."""
        super().load_weights(weights, version)
        spoil(self.policy)


class Headstrong(NativeEngine):
    """Samples and records with settings of its own, whatever is asked."""

    own: dict[str, Any]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Replace the settings of every request."""
        return super().generate(
            [replace(r, sampling=replace(r.sampling, **self.own)) for r in requests]
        )


class Forgetful(NativeEngine):
    """Leaves some names out of every update."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights but those of one layer."""
        super().load_weights([(n, w) for n, w in weights if "layers.1.mlp" not in n], version)


class Noisy(NativeEngine):
    """Spoils its log-probs whenever it applies a temperature."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Add noise to what is recorded."""
        return [
            c
            if c.provenance.temperature == 1.0
            else replace(c, behavior_logp=c.behavior_logp - torch.rand(len(c.token_ids)))
            for c in super().generate(requests)
        ]


class Leaky(Policy):
    """A trainer whose log-probs depend on how many tokens are computed together."""

    def hidden_states(self, input_ids: Tensor, packed: PackedLayout | None, at: Tensor) -> Tensor:
        """Scale the logits with the number of tokens."""
        return super().hidden_states(input_ids, packed, at) * (1.0 + 2e-5 * len(at))


def spoil(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = policy.model.model.layers[1].mlp.down_proj.weight
        weight.mul_(1.0 + 0.2 * torch.randn(weight.shape, generator=generator))


def drift(policy: Policy, scale: float = 0.03) -> None:
    """Move all weights a little, as some training would."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.0 + scale * torch.randn(parameter.shape, generator=generator))


class SecretFp8(NativeEngine):
    """Computes in FP8 and reports float32."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample, and hide how."""
        return [
            replace(sampled, provenance=replace(sampled.provenance, precision="float32"))
            for sampled in super().generate(requests)
        ]


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_stack_is_on_policy(model_folder: Path, seed: int) -> None:
    policy = load(model_folder)
    config = config_of(model_folder, seed=seed)
    verdict, examination = diagnose(config, policy, NativeEngine(policy, seed=seed))
    assert verdict.is_on_policy
    assert verdict.sentences[0].startswith("On-policy up to the rounding of float32")
    assert examination.sampling.total.one_minus_ess < 1e-9
    assert abs(examination.sampling.total.mean_ratio - 1.0) < 1e-5
    assert examination.probe.share == pytest.approx(1.0, abs=1e-3)


def test_an_engine_with_a_copy_of_the_weights_is_on_policy(model_folder: Path) -> None:
    engine = NativeEngine(load(model_folder), seed=0)
    verdict, _ = diagnose(config_of(model_folder), load(model_folder), engine)
    assert verdict.is_on_policy


def test_bfloat16_on_both_sides_is_on_policy(model_folder: Path) -> None:
    engine = NativeEngine(load(model_folder, "bfloat16"), seed=0)
    verdict, examination = diagnose(
        config_of(model_folder, model={"precision": "bfloat16"}),
        load(model_folder, "bfloat16"),
        engine,
    )
    assert verdict.is_on_policy
    assert "the rounding of bfloat16" in words(verdict)
    assert examination.arithmetic.effects["float32"].mean_abs > 1e-3


@pytest.mark.parametrize("engine_of", ["the policy", "a replica"])
def test_adapters_beside_rounded_weights_are_on_policy(model_folder: Path, engine_of: str) -> None:
    """The test update moves what is published; a replica gets nothing else."""
    pytest.importorskip("peft")
    tree = {"precision": "bfloat16", "device": "cpu", "lora": {"rank": 4}}
    config = config_of(model_folder, model=tree)
    policy = load_policy(config)
    sampler = policy if engine_of == "the policy" else load_policy(config)
    verdict, examination = diagnose(config, policy, NativeEngine(sampler, seed=0))
    assert verdict.is_on_policy
    assert policy.model.lm_head.weight.dtype == torch.bfloat16
    assert examination.probe.share == pytest.approx(1.0, abs=0.05)
    assert examination.arithmetic.effects["float32"].mean_abs > 1e-3


def test_raw_logprobs_at_temperature_06_are_named(model_folder: Path) -> None:
    policy = load(model_folder)
    engine = Rewriting(policy, seed=0)
    engine.recorded = {"temperature": 1.0}
    config = config_of(model_folder, rollout={"temperature": 0.6})
    verdict, examination = diagnose(config, policy, engine)
    assert found(verdict) == ({"logprob_mode"}, {"temperature"})
    assert "log-probs are those of T = 1, the tokens are sampled from T = 0.6" in words(verdict)
    # the ratios look perfect, and that is the trap
    assert examination.sampling.total.one_minus_ess < 1e-9
    assert examination.sampling.true.one_minus_ess > 0.05


def test_raw_logprobs_by_configuration_are_no_fault(model_folder: Path) -> None:
    policy = load(model_folder)
    rollout = {"temperature": 0.6, "logprob_mode": "raw"}
    verdict, _ = diagnose(
        config_of(model_folder, rollout=rollout), policy, NativeEngine(policy, seed=0)
    )
    assert found(verdict) == (set(), {"logprob_mode", "temperature"})
    assert 'Set rollout.logprob_mode = "processed"' in words(verdict)


def test_top_p_without_renormalization_is_named(model_folder: Path) -> None:
    policy = load(model_folder)
    engine = Rewriting(policy, seed=0)
    engine.recorded = {"top_p": 1.0}
    config = config_of(model_folder, rollout={"top_p": 0.9})
    verdict, _ = diagnose(config, policy, engine)
    assert found(verdict) == ({"support"}, set())
    assert "sampled with top_p = 0.9, but the recorded log-probs are not renormalized" in words(
        verdict
    )


def test_stale_weights_are_named(model_folder: Path) -> None:
    policy = load(model_folder)
    engine = Deaf(load(model_folder), seed=0)
    drift(policy)
    verdict, examination = diagnose(config_of(model_folder), policy, engine)
    assert found(verdict) == ({"stale_weights"}, set())
    assert "ignores weight updates" in words(verdict)
    assert "though it reports the new version" in words(verdict)
    assert abs(examination.probe.share) < 0.2


def test_staleness_is_found_before_it_does_harm(model_folder: Path) -> None:
    engine = Deaf(load(model_folder), seed=0)
    verdict, examination = diagnose(config_of(model_folder), load(model_folder), engine)
    assert found(verdict) == ({"stale_weights"}, set())
    assert examination.sampling.total.one_minus_ess < 1e-9


def test_fp8_is_named(model_folder: Path) -> None:
    policy = load(model_folder)
    engine = SecretFp8(policy, seed=0, precision="fp8")
    verdict, examination = diagnose(config_of(model_folder), policy, engine)
    assert found(verdict) == ({"precision"}, set())
    assert "computes in fp8, though it reports float32" in words(verdict)
    assert examination.arithmetic.likeness["fp8"] > 0.9


def test_fp8_that_says_so_is_by_configuration(model_folder: Path) -> None:
    policy = load(model_folder)
    engine = NativeEngine(policy, seed=0, precision="fp8")
    verdict, _ = diagnose(config_of(model_folder), policy, engine)
    assert found(verdict) == (set(), {"precision"})


def test_fp8_keys_and_values_are_by_configuration(model_folder: Path) -> None:
    policy = load(model_folder)
    engine = NativeEngine(policy, seed=0, kv_precision="fp8")
    verdict, examination = diagnose(config_of(model_folder), policy, engine)
    assert found(verdict) == (set(), {"precision"})
    assert 'Set rollout.kv_precision = "auto" to remove it.' in words(verdict)
    assert examination.arithmetic.explained_by == "fp8-kv"
    assert examination.arithmetic.likeness["fp8-kv"] > 0.9


def test_bfloat16_against_float32_is_named(model_folder: Path) -> None:
    engine = NativeEngine(load(model_folder, "bfloat16"), seed=0)
    verdict, _ = diagnose(config_of(model_folder), load(model_folder), engine)
    assert found(verdict) == (set(), {"precision"})
    assert "computes in bfloat16; the trainer in float32" in words(verdict)


def test_a_perturbed_layer_is_named(model_folder: Path) -> None:
    copy = load(model_folder)
    spoil(copy)
    verdict, _ = diagnose(config_of(model_folder), load(model_folder), Perturbed(copy, seed=0))
    assert found(verdict) == ({"wrong_weights"}, set())
    assert "arrive but do not fix it" in words(verdict)


def test_wrong_weights_that_an_update_fixes_are_named(model_folder: Path) -> None:
    copy = load(model_folder)
    spoil(copy)
    verdict, _ = diagnose(config_of(model_folder), load(model_folder), NativeEngine(copy, seed=0))
    assert found(verdict) == ({"wrong_weights"}, set())
    assert "the engine started from other weights" in words(verdict)


@pytest.mark.parametrize(
    ("rollout", "cause"),
    [
        ({"temperature": 0.6}, "temperature"),
        ({"temperature": 1.2}, "temperature"),
        ({"top_p": 0.9}, "support"),
        ({"top_k": 5}, "support"),
    ],
)
def test_honest_settings_are_off_policy_by_configuration(
    model_folder: Path, rollout: dict[str, float], cause: str
) -> None:
    policy = load(model_folder)
    config = config_of(model_folder, rollout=rollout)
    verdict, examination = diagnose(config, policy, NativeEngine(policy, seed=0))
    assert found(verdict) == (set(), {cause})
    assert not verdict.is_on_policy
    parts = examination.sampling.parts
    assert parts[cause].one_minus_ess == pytest.approx(
        examination.sampling.total.one_minus_ess, rel=1e-3
    )
    assert all(part.mean_abs < 1e-5 for name, part in parts.items() if name != cause)


def test_a_clip_that_meets_another_temperature_is_named(model_folder: Path) -> None:
    policy = load(model_folder)
    tables = {"rollout": {"temperature": 0.6}, "objective": {"name": "dapo"}}
    config = config_of(model_folder, **tables)
    verdict, examination = diagnose(config, policy, NativeEngine(policy, seed=0))
    assert found(verdict) == (set(), {"temperature"})
    assert "wrong and likely (A < 0, r < 1 - clip_low)" in words(verdict)
    assert "so entropy falls by itself" in words(verdict)
    cured = config_of(model_folder, rollout={"temperature": 0.6})
    assert "entropy falls" not in words(judge(examination, cured))


def test_the_tempered_policy_is_on_policy_at_its_own_temperature(model_folder: Path) -> None:
    policy = load(model_folder)
    config = config_of(
        model_folder,
        rollout={"temperature": 0.6},
        training={"policy_temperature": "rollout"},
    )
    verdict, _ = diagnose(config, policy, NativeEngine(policy, seed=0))
    assert verdict.is_on_policy


@pytest.mark.parametrize(
    ("own", "cause", "sentence"),
    [
        ({"temperature": 0.7}, "temperature", "sampled at T = 0.7, but rollout.temperature is"),
        ({"top_p": 0.8}, "support", "sampled with top_p = 0.8, but all tokens is configured"),
        ({"top_k": 5}, "support", "sampled with top_k = 5, but all tokens is configured"),
    ],
)
def test_sampling_settings_that_nobody_asked_for_are_named(
    model_folder: Path, own: dict[str, Any], cause: str, sentence: str
) -> None:
    policy = load(model_folder)
    engine = Headstrong(policy, seed=0)
    engine.own = own
    verdict, _ = diagnose(config_of(model_folder), policy, engine)
    assert found(verdict) == ({cause}, set())
    assert sentence in words(verdict)


def test_a_layer_that_updates_leave_out_is_named(model_folder: Path) -> None:
    engine = Forgetful(load(model_folder), seed=0)
    verdict, _ = diagnose(config_of(model_folder), load(model_folder), engine)
    assert found(verdict) == ({"partial_update"}, set())


def test_logprobs_that_fit_nothing_are_named(model_folder: Path) -> None:
    policy = load(model_folder)
    config = config_of(model_folder, rollout={"temperature": 0.8})
    verdict, _ = diagnose(config, policy, Noisy(policy, seed=0))
    assert found(verdict) == ({"unknown_logprobs"}, {"temperature"})


def test_a_trainer_that_depends_on_its_micro_batches_is_named(model_folder: Path) -> None:
    plain = load(model_folder)
    policy = Leaky(plain.model, plain.tokenizer, name="leaky", precision="float32")
    config = config_of(model_folder, training={"share_prompts": False})
    verdict, _ = diagnose(config, policy, NativeEngine(policy, seed=0))
    assert found(verdict) == ({"micro_batch"}, set())
    assert "The trainer disagrees with itself" in words(verdict)


def test_tokens_that_fit_no_law_are_named(model_folder: Path) -> None:
    policy = load(model_folder)
    config = config_of(model_folder)
    _, healthy = diagnose(config, policy, NativeEngine(policy, seed=0))
    sampling = replace(healthy.sampling, z=dict.fromkeys(healthy.sampling.z, 9.0))
    verdict = judge(replace(healthy, sampling=sampling), config)
    assert found(verdict) == ({"unknown_distribution"}, set())


def test_what_comes_later_is_noted(model_folder: Path) -> None:
    policy = load(model_folder)
    config = config_of(model_folder, rollout={"lag": 4}, training={"mini_batches": 2})
    verdict, _ = diagnose(config, policy, NativeEngine(policy, seed=0))
    assert verdict.is_on_policy
    assert "rollout.lag = 4" in words(verdict)
    assert "2 updates of each batch" in words(verdict)


CONFIG = """
[model]
name = {model!r}
device = "cpu"
precision = "float32"
[task]
name = "arithmetic"
[rollout]
max_tokens = 12
[run]
folder = {folder!r}
"""


@pytest.mark.parametrize(
    "tables",
    [
        {"rollout": {"temperature": 1.2}},
        {"rollout": {"temperature": 0.6, "top_p": 0.9, "top_k": 8}},
        {"rollout": {"precision": "bfloat16", "temperature": 1.2}},
        {"training": {"policy_temperature": 0.7}},
        {"rollout": {"logprob_mode": "raw"}, "training": {"policy_temperature": 0.7}},
    ],
)
def test_an_anchor_that_is_the_policy_is_no_finding(
    model_folder: Path, tables: dict[str, dict[str, Any]]
) -> None:
    policy = load(model_folder)
    config = config_of(model_folder, **tables)
    engine = NativeEngine(policy, seed=0, precision=config.rollout.precision)
    verdict, examination = diagnose(config, policy, engine)
    (finding,) = [each for each in verdict.findings if each.check == "anchor"]
    assert finding.status is Status.GOOD
    assert found(verdict)[0] == set()
    assert examination.anchor is not None
    if config.rollout.precision == "auto":
        assert examination.anchor.mismatch.max_abs < 1e-4
        assert 0 < examination.anchor.top_residual < 1e-5


@pytest.mark.parametrize(
    ("rollout", "wrong", "named"),
    [
        # what an engine does that knows of no anchor
        (
            {"temperature": 1.2},
            lambda _: {"anchor_logp": None, "anchor_top_logp": None},
            "those of T = 1.2, and not those of the policy at T = 1:",
        ),
        (
            {"top_p": 0.9},
            lambda _: {"anchor_logp": None, "anchor_top_logp": None},
            "those of T = 1, top_p = 0.9, and not",
        ),
        (
            {"temperature": 0.6},
            lambda c: {"anchor_logp": 1.3 * c.anchor_logp},
            "fit nothing that was tried",
        ),
        (
            {"temperature": 1.2},
            lambda c: {"anchor_top_logp": c.behavior_top_logp},
            "fit nothing that was tried",
        ),
    ],
)
def test_another_anchor_is_named(
    model_folder: Path,
    rollout: dict[str, float],
    wrong: Callable[[Completion], dict[str, Any]],
    named: str,
) -> None:
    policy = load(model_folder)
    verdict, examination = diagnose(
        config_of(model_folder, rollout=rollout), policy, Misanchored(policy, wrong=wrong)
    )
    assert verdict.causes(Status.FAULT) == ["anchor"]
    assert named in words(verdict)
    assert "softmax(logits / 1) before temperature and truncation" in words(verdict)
    assert examination.sampling.parts["arithmetic"].max_abs < 1e-4, (
        "what was sampled is as recorded"
    )


def test_a_run_without_an_anchor_of_its_own_is_not_asked_for_it(model_folder: Path) -> None:
    policy = load(model_folder)
    for tables in (
        {"rollout": {"temperature": 1.0}},
        {"rollout": {"temperature": 1.2}, "objective": {"name": "p3o", "anchor": "sampler"}},
        {"rollout": {"temperature": 1.2}, "objective": {"name": "grpo"}},
    ):
        # for the ledger the engine would record it all the same
        config = config_of(model_folder, run={"ledger_every": 0}, **tables)
        verdict, examination = diagnose(config, policy, NativeEngine(policy, seed=0))
        assert examination.anchor is None
        assert all(finding.check != "anchor" for finding in verdict.findings)


@pytest.fixture
def config_file(model_folder: Path, tmp_path: Path) -> str:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG.format(model=str(model_folder), folder=str(tmp_path / "runs")))
    return str(file)


def test_the_command_of_a_healthy_stack(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", config_file, "--tokens", "600"]) == 0
    out = capsys.readouterr().out
    assert "E[r] = 1.000000" in out
    assert "On-policy" in out
    for check in ("weights", "precision", "temperature", "top-p", "log-prob mode", "micro-batch"):
        assert check in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml"]


def test_the_command_of_an_off_policy_stack(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "doctor.json"
    arguments = ["--tokens", "600", "--rollout.temperature=0.6", "--json", str(record)]
    assert main(["doctor", config_file, *arguments]) == 1
    assert "T = 0.6 by rollout.temperature" in " ".join(capsys.readouterr().out.split())
    read = json.loads(record.read_text())
    assert (read["on_policy"], read["faults"]) == (False, [])
    assert read["by_configuration"] == ["temperature"]
    assert read["examination"]["sampling"]["sampled"] == "T = 0.6"
    assert read["examination"]["sampling"]["total"]["one_minus_ess"] > 0.01
    assert read["findings"][0]["check"] == "weights"


def test_the_command_leaves_a_run_as_it_is(config_file: str, tmp_path: Path) -> None:
    small = ["--training.steps=1", "--rollout.prompts_per_step=2", "--rollout.samples_per_prompt=2"]
    assert main(["train", config_file, *small]) == 0
    files = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert main(["doctor", config_file, "--tokens", "300", "--seed=3"]) == 0
    assert files == {
        path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()
    }


def test_a_wrong_configuration_is_status_2(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", config_file, "--rollout.temprature=0.6"]) == 2
    assert "did you mean 'rollout.temperature'" in capsys.readouterr().err


def test_other_models_in_the_mixture_are_named(model_folder: Path) -> None:
    policy = load(model_folder)
    others = [{"model": str(model_folder), "name": "twin", "share": 0.5}]
    config = config_of(model_folder, rollout={"policies": others})
    verdict, _ = diagnose(config, policy, NativeEngine(policy, seed=0))
    assert found(verdict) == (set(), {"second_policies"})
    assert not verdict.is_on_policy
    assert "50% from twin" in words(verdict)
