"""Names of other frameworks: what they are called here, wherever they are written."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.peer_page import coming_from

import trustbatch
from trustbatch.config import load_config, parse_config
from trustbatch.config.keys import config_keys, is_flag
from trustbatch.config.peer_names import PEER_NAMES, TRL, PeerName, find_peer_name
from trustbatch.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
MINIMAL: dict[str, Any] = {"model": {"name": "m"}, "task": {"name": "arithmetic"}}


def refused(**tables: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(MINIMAL | tables)
    return str(caught.value)


@pytest.mark.parametrize("name", PEER_NAMES, ids=lambda name: f"{name.peer}-{name.name}")
def test_every_name_leads_to_keys_that_exist(name: PeerName) -> None:
    tables = {key.rpartition(".")[0] for key in config_keys()}
    for key in name.keys:
        assert key in config_keys() or key in tables, key
    assert name.keys or name.note
    assert not name.note.endswith(".")
    found = find_peer_name(name.name)
    # of two frameworks with the same name, the first is quoted
    assert found is not None
    assert found.name.rpartition(".")[2] == name.name.rpartition(".")[2]
    # no key of our own is taken for another framework's
    assert name.name not in config_keys()


def test_the_names_of_trl_are_its_own() -> None:
    trl = pytest.importorskip("trl")
    known = {
        field
        for kind in (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments)
        for field in kind.__dataclass_fields__
    }
    arguments = {"reward_funcs"}  # of the trainer
    earlier = {"max_prompt_length", "warmup_ratio"}
    ours = {name.name for name in PEER_NAMES if name.peer == TRL}
    assert ours - known == arguments | earlier


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        (
            {"num_generations": 8},
            "Unknown key 'num_generations': TRL's num_generations is rollout.samples_per_prompt "
            "here.",
        ),
        (
            {"training": {"gradient_accumulation_steps": 4}},
            "Unknown key 'training.gradient_accumulation_steps': TRL's gradient_accumulation_steps "
            "has no counterpart here: losses are exact for any split of a batch, so memory is set "
            "with training.micro_batch_tokens alone.",
        ),
        (
            {"rollout": {"n": 8}},
            "Unknown key 'rollout.n': verl's n is rollout.samples_per_prompt here.",
        ),
        (
            {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}}},
            "Unknown key 'actor_rollout_ref.actor.optim.lr': verl's lr is training.learning_rate "
            "here.",
        ),
        (
            {"max_async_level": 2},
            "Unknown key 'max_async_level': prime-rl's max_async_level is cluster.max_lag and "
            "rollout.lag here, the exact number of versions without [cluster], and the largest "
            "with it.",
        ),
        (
            {"objective": {"name": "grpo", "epsilon_high": 0.3}},
            "The objective grpo has no option 'epsilon_high'; its options are entropy_coef, "
            "reference_kl_coef, clip_low, clip_high; TRL's epsilon_high is objective.clip_high "
            "here, with an objective that clips.",
        ),
    ],
)
def test_a_name_of_another_framework_is_translated(tables: dict[str, Any], sentence: str) -> None:
    assert refused(**tables) == sentence


def test_a_last_part_alone_says_too_little() -> None:
    assert find_peer_name("actor_rollout_ref.model.path") is not None
    assert find_peer_name("reward.path") is None
    assert find_peer_name("rollout.type") is None
    assert find_peer_name("objective.clip_ratio") is not None
    assert find_peer_name("zzz") is None


def test_a_file_and_python_say_the_same(tmp_path: Path) -> None:
    words = "TRL's max_completion_length is rollout.max_tokens here."
    file = tmp_path / "config.toml"
    file.write_text(
        '[model]\nname = "m"\n[task]\nname = "arithmetic"\n[rollout]\nmax_completion_length = 9'
    )
    with pytest.raises(ConfigError, match=words):
        load_config(file)
    with pytest.raises(ConfigError, match=words):
        trustbatch.train(model="m", task="arithmetic", max_completion_length=9)


def test_a_key_of_another_table_is_found() -> None:
    assert refused(learning_rat=1) == (
        "Unknown key 'learning_rat': did you mean 'training.learning_rate'?"
    )
    assert "did you mean 'rollout.samples_per_prompt'?" in refused(
        training={"samples_per_promt": 2}
    )


def test_flags_are_the_keys_that_are_true_or_false() -> None:
    assert is_flag("training.compile")
    assert is_flag("rollout.vllm.sleep")
    assert is_flag("task.shuffle")
    assert is_flag("task.thinking")  # or unset
    assert not is_flag("training.steps")
    assert not is_flag("no.such.key")


def test_the_page_is_the_table() -> None:
    """`python -m tests.support.peer_page > docs/coming-from.md` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == coming_from()
