"""[rollout.vllm]: what does not fit together is refused in one sentence, without vLLM."""

from pathlib import Path
from typing import Any

import pytest

from trustbatch.build.engines import recorded_anchor_temperature
from trustbatch.config import load_config, parse_config
from trustbatch.errors import ConfigError
from trustbatch.models.config import LoraConfig
from trustbatch.models.policy import Policy
from trustbatch.rollout.vllm import info
from trustbatch.rollout.vllm.config import VllmConfig
from trustbatch.rollout.vllm.engine import VllmEngine

MINIMAL: dict[str, Any] = {"model": {"name": "m"}, "task": {"name": "arithmetic"}}


def refused(**rollout: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({**MINIMAL, "rollout": rollout})
    return str(caught.value)


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"vllm": {"mode": "in_process"}}, 'rollout.engine = "vllm"'),
        ({"engine": "vllm", "vllm": {"mode": "thread"}}, "rollout.vllm.mode"),
        ({"engine": "vllm", "vllm": {"tensor_paralel": 2}}, "rollout.vllm.tensor_parallel"),
        ({"engine": "vllm", "vllm": {"mode": "in_process", "tensor_parallel": 2}}, "server"),
        ({"engine": "vllm", "vllm": {"mode": "in_process", "devices": "1"}}, "server"),
        (
            {"engine": "vllm", "vllm": {"mode": "in_process", "weight_transfer": "ipc"}},
            "in_process",
        ),
        ({"engine": "vllm", "vllm": {"weight_transfer": "in_process"}}, "shared_memory"),
        ({"engine": "vllm", "vllm": {"generate_seconds": 0}}, "rollout.vllm.generate_seconds"),
        ({"engine": "vllm", "precision": "int4"}, "rollout.precision"),
    ],
)
def test_wrong_values_get_a_sentence(rollout: dict[str, Any], words: str) -> None:
    sentence = refused(**rollout)
    assert words in sentence
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))


def test_the_table_is_written_only_where_it_has_an_effect(tmp_path: Path) -> None:
    native = parse_config(MINIMAL)
    assert "vllm" not in native.to_dict()["rollout"]
    config = parse_config({**MINIMAL, "rollout": {"engine": "vllm", "vllm": {"sleep": True}}})
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert load_config(file) == config


def test_a_missing_vllm_is_named(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trustbatch\[vllm\]"):
        VllmEngine(policy, VllmConfig(), seed=0)


@pytest.mark.parametrize(
    ("config", "precision", "words"),
    [
        (VllmConfig(), "fp8", "needs a GPU"),
        (VllmConfig(weight_transfer="ipc"), "auto", "needs a policy on a GPU"),
    ],
)
def test_what_a_cpu_can_not_do_is_refused(
    policy: Policy,
    monkeypatch: pytest.MonkeyPatch,
    config: VllmConfig,
    precision: str,
    words: str,
) -> None:
    monkeypatch.setattr(info, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=words):
        VllmEngine(policy, config, seed=0, precision=precision)


def test_adapters_that_vllm_can_not_have_are_refused(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    config = VllmConfig(adapters="alone")
    with pytest.raises(ConfigError, match="for one training process, and torchrun started 2"):
        info.INFO.check_ranks(config, 2)
    info.INFO.check_ranks(VllmConfig(), 2)
    monkeypatch.setattr(info, "find_spec", lambda name: object())
    policy.add_adapters(LoraConfig(rank=600), seed=0)
    assert policy.adapters is not None
    policy.adapters.published_alone = True
    with pytest.raises(ConfigError, match="of rank 512 at most"):
        VllmEngine(policy, config, seed=0)


@pytest.mark.parametrize(
    ("tables", "temperature"),
    [
        ({}, None),
        ({"rollout": {"temperature": 1.2}}, 1.0),
        ({"rollout": {"top_p": 0.9}}, 1.0),
        ({"rollout": {"top_k": 5}}, 1.0),
        ({"training": {"policy_temperature": 0.7}}, 0.7),
        (
            {"rollout": {"temperature": 1.2}, "training": {"policy_temperature": "rollout"}},
            None,
        ),
        ({"rollout": {"temperature": 0.6, "logprob_mode": "raw"}}, None),
        ({"rollout": {"temperature": 1.2}, "objective": {"name": "grpo"}}, None),
        (
            {"rollout": {"temperature": 1.2}, "objective": {"name": "p3o", "anchor": "sampler"}},
            None,
        ),
        ({"rollout": {"policies": [{"model": "o", "share": 0.5, "temperature": 0.6}]}}, 1.0),
        ({"rollout": {"policies": [{"model": "o", "share": 0.5}]}}, None),
    ],
)
def test_vllm_is_started_for_an_anchor_only_where_one_is_recorded(
    tables: dict[str, Any], temperature: float | None
) -> None:
    rollout = {"engine": "vllm", **tables.get("rollout", {})}
    config = parse_config({**MINIMAL, **tables, "rollout": rollout})
    assert recorded_anchor_temperature(config) == temperature
