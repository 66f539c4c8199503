"""[rollout.vllm]: what does not fit together is refused in one sentence, without vLLM."""

from pathlib import Path
from typing import Any

import pytest

from trustbatch.config import VllmConfig, load_config, parse_config
from trustbatch.errors import ConfigError
from trustbatch.policy import Policy
from trustbatch.rollout import vllm_engine
from trustbatch.rollout.vllm_engine import VllmEngine

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
        ({"engine": "vllm", "vllm": {"mode": "in_process", "weight_transfer": "ipc"}}, "direct"),
        ({"engine": "vllm", "vllm": {"weight_transfer": "direct"}}, "shared_memory"),
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
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: None)
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
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=words):
        VllmEngine(policy, config, seed=0, precision=precision)
