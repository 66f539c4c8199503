from pathlib import Path
from typing import Any, get_args

import pytest

from trustbatch.config import Config, load_config, parse_config
from trustbatch.errors import ConfigError
from trustbatch.objectives.pact import PACT

MINIMAL: dict[str, Any] = {"model": {"name": "m"}, "task": {"name": "arithmetic"}}


def refused(**tables: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(MINIMAL | tables)
    return str(caught.value)


def test_defaults_are_the_papers() -> None:
    config = parse_config(MINIMAL)
    training = config.training
    assert (training.learning_rate, training.betas, training.weight_decay) == (
        1e-5,
        (0.9, 0.95),
        0.01,
    )
    assert (training.gradient_clip, training.schedule, training.warmup_fraction) == (
        1.0,
        "cosine",
        0.1,
    )
    assert config.policy_temperature == 1.0
    assert config.advantage.name == "group_standardized"


@pytest.mark.parametrize("name", ["p3o", "two_anchor", "pact"])
def test_objectives_with_a_kl_use_the_engines_top_tokens_by_default(name: str) -> None:
    config = parse_config(MINIMAL | {"objective": {"name": name}})
    assert config.objective.options == {"kl": "top_k"}
    assert config.objective.build().needs_top_logp
    assert config.rollout.top_logprobs == 16
    without = parse_config(MINIMAL | {"objective": {"name": name}, "rollout": {"top_logprobs": 0}})
    assert without.objective.options == {"kl": "importance"}
    told = parse_config(MINIMAL | {"objective": {"name": "p3o", "kl": "importance"}})
    assert told.rollout.top_logprobs == 0
    fewer = parse_config(MINIMAL | {"rollout": {"top_logprobs": 4}})
    assert fewer.rollout.top_logprobs == 4
    grpo = parse_config(MINIMAL | {"objective": {"name": "grpo"}})
    assert grpo.rollout.top_logprobs == 0


def test_the_default_objective_sees_the_support_where_rollouts_are_truncated() -> None:
    def chosen(**tables: Any) -> str:
        return parse_config(MINIMAL | tables).objective.name

    assert chosen() == chosen(rollout={"top_p": 1.0, "top_k": 0}) == "p3o"
    assert chosen(rollout={"top_p": 0.95}) == chosen(rollout={"top_k": 20}) == "pact"
    assert chosen(rollout={"top_p": 0.95}, objective={"kl": "k3"}) == "pact"
    assert chosen(rollout={"top_p": 0.95}, objective={"name": "p3o"}) == "p3o"


def test_toml_round_trip_is_exact() -> None:
    import tomllib

    config = parse_config(
        MINIMAL
        | {"seed": 5, "objective": {"name": "grpo", "clip_high": 0.28}, "run": {"name": "x"}}
    )
    assert parse_config(tomllib.loads(config.to_toml())) == config


def test_a_choice_survives_toml_with_its_own_options_alone() -> None:
    import tomllib

    tree: dict[str, Any] = MINIMAL | {
        "task": {
            "name": "gsm8k",
            "split": "test",
            "exclude": ["a.jsonl"],
            "curriculum": {"low": 0},
        },
        "advantage": {"name": "group_quantile", "quantile": 0.3},
        "objective": {"name": "pact", "pull": 0.5, "kl": "k3"},
        "reward": {"terms": [{"name": "format", "boxed": True, "weight": 0.5}]},
        "evaluation": {"every": 2, "suite": ["aime24", {"name": "arithmetic", "level": 1}]},
    }
    config = parse_config(tree)
    assert parse_config(tomllib.loads(config.to_toml())) == config
    written = config.to_dict()
    for table in ("task", "advantage", "objective", "reward", "evaluation"):
        assert tree[table].items() <= written[table].items()
    assert config.objective.build() == PACT(pull=0.5, kl="k3")


def test_a_task_by_path_is_checked_where_it_is_built() -> None:
    own = f"{Path(__file__).parents[1] / 'support' / 'own_task.py'}:Plain"
    config = parse_config(MINIMAL | {"task": {"name": own, "first": 3}})
    assert config.task.build(seed=0).prompt(0).text == "3+0="
    # a configuration is also read where the module is not
    parse_config(MINIMAL | {"task": {"name": "no_such_module:Task", "any": 1}})
    for option, words in [("frist", "did you mean 'first'"), ("zzz", "its options are first")]:
        wrong = parse_config(MINIMAL | {"task": {"name": own, option: 3}})
        with pytest.raises(ValueError, match=words):
            wrong.task.build(seed=0)


def test_overrides_beat_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[model]\nname = "m"\n[task]\nname = "arithmetic"\nlevel = 1\n[training]\nsteps = 5\n'
    )
    config = load_config(
        file,
        [
            "--training.steps=7",
            "--rollout.temperature=1.2",
            "--objective.name=grpo",
            "--objective.clip_high=0.5",
            "--training.betas=[0.8, 0.9]",
            "--task.level=3",
            "--training.policy_temperature=rollout",
        ],
    )
    assert config.training.steps == 7
    assert config.training.betas == (0.8, 0.9)
    assert config.policy_temperature == 1.2
    assert config.objective.options == {"clip_high": 0.5}
    assert config.task.options == {"level": 3}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"rollouts": {}}, "Unknown key 'rollouts': did you mean 'rollout'?"),
        (
            {"training": {"learning_rat": 1}},
            "Unknown key 'training.learning_rat': did you mean 'training.learning_rate'?",
        ),
        ({"training": {"zzz": 1}}, "Unknown key 'training.zzz': known are steps, passes"),
        ({"rollout": {"max_tokens": 0}}, "rollout.max_tokens = 0: input should be greater than"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature = 0"),
        ({"rollout": {"samples_per_prompt": 1}}, "set it to 2 or more"),
        (
            {"advantage": {"name": "group_centered", "epsilon": 1.0}},
            "The advantage group_centered has no option 'epsilon'; it has no options.",
        ),
        (
            {"advantage": {"name": "group_center"}},
            "There is no advantage 'group_center' (did you mean 'group_centered'?)",
        ),
        ({"advantage": {"epsilon": "big"}}, "advantage.epsilon = 'big' must be a number"),
        ({"advantage": {"epsilon": 0}}, "advantage.epsilon must be a number above 0, not 0"),
        ({"advantage": {"quantile": 0.4}}, "group_standardized has no option 'quantile'"),
        (
            {"advantage": {"name": "group_quantile", "quantile": 1.0}},
            "advantage.quantile must be between 0 and 1, not 1",
        ),
        ({"objective": {"name": "ppo"}}, "There is no objective 'ppo'"),
        ({"objective": {"name": "p30"}}, "did you mean 'p3o'?"),
        ({"objective": {"name": "p3o", "clip_low": 0.2}}, "p3o has no option 'clip_low'"),
        ({"objective": {"name": "grpo", "clip_hihg": 0.2}}, "did you mean 'clip_high'?"),
        (
            {"objective": {"name": "grpo", "clip_low": -1}},
            "objective.clip_low must be a number from 0 to 1",
        ),
        (
            {"rollout": {"top_logprobs": 0}, "objective": {"name": "pact", "kl": "top_k"}},
            "requires rollout.top_logprobs above 0",
        ),
        ({"objective": {"kl": 3}}, "objective.kl = 3 must be a string"),
        ({"objective": {"kl": "k4"}}, "objective.kl must be one of auto, importance"),
        ({"objective": {"options": 3}}, "The objective p3o has no option 'options'"),
        ({"task": {"name": "aritmetic"}}, "(did you mean 'arithmetic'?)"),
        ({"task": {"name": "arithmetic", "levle": 1}}, "'levle' (did you mean 'level'?)"),
        ({"task": {"name": "arithmetic", "level": "1"}}, "task.level = '1' must be an integer"),
        ({"task": {"name": "arithmetic", "seed": 1}}, "The task arithmetic has no option 'seed'"),
        (
            {"task": {"name": "gsm8k", "curriculum": {"lo": 0}}},
            "The table task.curriculum has no option 'lo' (did you mean 'low'?)",
        ),
        ({"task": {"name": "mixture"}}, "The task mixture needs the option parts: set task.parts"),
        (
            {"evaluation": {"every": 1, "suite": [{"name": "arithmetic", "levle": 1}]}},
            "The task arithmetic has no option 'levle' (did you mean 'level'?)",
        ),
        (
            {"evaluation": {"every": 1, "suite": [{"name": "x.jsonl", "templat": "plain"}]}},
            "The task file has no option 'templat' (did you mean 'template'?)",
        ),
        (
            {"reward": {"terms": [{"name": "math", "decimls": 2}]}},
            "The reward term math has no option 'decimls' (did you mean 'decimals'?)",
        ),
        ({"training": {"policy_temperature": 0}}, "training.policy_temperature must be above 0"),
        ({"training": {"policy_temperature": "hot"}}, "policy_temperature"),
        ({"training": {"betas": [0.9, 1.0]}}, "training.betas must be two numbers"),
        ({"training": {"mini_batches": 1000}}, "training.mini_batches = 1000 is more than the 256"),
        ({"seed": "x"}, 'seed = "x"'),
        ({"objective": "grpo"}, "objective is a table: set objective.name"),
        ({"training": {"learning_rate": float("inf")}}, "training.learning_rate"),
        ({"training": {"reference_model": "x"}}, "objective.reference_kl_coef above 0"),
        ({"run": {"name": "../x"}}, "run.name"),
        ({"run": {"name": ".."}}, "run.name"),
        ({"run": {"name": ""}}, "run.name"),
    ],
)
def test_wrong_values_get_a_sentence(tables: dict[str, Any], words: str) -> None:
    message = refused(**tables)
    assert words in message
    assert message.endswith((".", "?"))


HALF: dict[str, Any] = {"model": "x", "share": 0.5}


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        (
            [HALF | {"shar": 1}],
            "'rollout.policies.0.shar': did you mean 'rollout.policies.0.share'",
        ),
        ([HALF, {"modle": "y", "share": 0}], "did you mean 'rollout.policies.1.model'?"),
        ([HALF | {"zzz": 1}], "Unknown key 'rollout.policies.0.zzz': known are model, share, name"),
        ([{"share": 0.5}], "rollout.policies.0.model is missing"),
        ([HALF, HALF | {"share": 2}], "rollout.policies.1.share = 2: input should be less"),
        (
            [HALF | {"temperature": 0}],
            "rollout.policies.0.temperature = 0: input should be greater",
        ),
        ([HALF | {"precision": "int8"}], 'rollout.policies.0.precision = "int8"'),
        (HALF, "rollout.policies is a list of tables: write [[rollout.policies]]"),
        (["x"], "rollout.policies.0 is a table: set rollout.policies.0.model"),
        ([HALF, {"model": "y", "share": 0.6}], "shares that add up to 1.1"),
        ([HALF, HALF], "rollout.policies has two called 'x': give each a name"),
        ([HALF | {"name": "m"}], "called 'm', as the trained model: give it a name of its own"),
    ],
)
def test_wrong_second_policies_get_a_sentence(policies: Any, words: str) -> None:
    message = refused(rollout={"policies": policies})
    assert words in message
    assert "\n" not in message or "missing" in message
    assert message.endswith((".", "?"))


def test_every_faulty_second_policy_is_named() -> None:
    message = refused(rollout={"policies": [{"share": 0.1}, HALF | {"top_p": 0, "top_k": -1}]})
    assert [line.split()[0] for line in message.splitlines()] == [
        "rollout.policies.0.model",
        "rollout.policies.1.top_p",
        "rollout.policies.1.top_k",
    ]


def test_second_policies_survive_toml_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[model]\nname = "m"\n[task]\nname = "arithmetic"\n'
        '[[rollout.policies]]\nmodel = "x"\nshare = 0.6\n'
        '[[rollout.policies]]\nmodel = "y"\nname = "teacher"\nshare = 0.3\n'
        '[[rollout.policies]]\nmodel = "z"\nshare = 0.1\ntemperature = 0.7\n'
    )
    config = load_config(file, ["--rollout.policies.0.share=0.5"])
    policies = config.rollout.policies
    assert [policy.share for policy in policies] == [0.5, 0.3, 0.1]
    assert [policy.policy_name for policy in policies] == ["x", "teacher", "z"]
    assert policies[2].temperature == 0.7
    file.write_text(config.to_toml())
    assert load_config(file) == config
    # added up as decimals: as binary numbers these are above 1
    shares = (0.01, 0.32, 0.56, 0.11)
    assert sum(shares) > 1
    parse_config(
        MINIMAL | {"rollout": {"policies": [{"model": str(s), "share": s} for s in shares]}}
    )
    replaced = load_config(file, ['--rollout.policies=[{model = "w", share = 0.25}]'])
    assert [policy.model for policy in replaced.rollout.policies] == ["w"]
    for override, words in [
        ("--rollout.policies.3.share=0.5", "rollout.policies is a list of 3 tables"),
        ("--rollout.policies.share=0.5", "name one by its index from 0"),
        ("--rollout.policies.0=0.5", "and a key of it"),
        ("--rollout.policies.x.share=0.5", "name one by its index from 0"),
        ("--rollout.policies.0.share.x=1", "it is a value"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_config(file, [override])


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({})
    assert "model.name is missing" in str(caught.value)
    assert "task.name is missing" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--training", "write --table.key=value"),
        ("training.steps=1", "write --table.key=value"),
        ("--seed.x=1", "it is a value"),
    ],
)
def test_malformed_overrides_get_a_sentence(tmp_path: Path, override: str, words: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text('seed = 1\n[model]\nname = "m"\n[task]\nname = "arithmetic"\n')
    with pytest.raises(ConfigError, match=words):
        load_config(file, [override])


def test_unreadable_files_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(broken)


def leaf_fields(model: Any, prefix: str = "") -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        inner = next(iter(get_args(field.annotation)), field.annotation)
        if hasattr(inner, "model_fields"):
            names += leaf_fields(inner, f"{prefix}{name}.")
        else:
            names.append(f"{prefix}{name}")
    return names


def test_every_key_is_read_outside_the_configuration() -> None:
    paths = list((Path(__file__).parents[2] / "src").rglob("*.py"))
    tables = [path for path in paths if path.name == "config.py" or path.parent.name == "config"]
    text = "\n".join(path.read_text() for path in paths if path not in tables)
    config_text = "\n".join(path.read_text() for path in tables)
    for name in leaf_fields(Config):
        last = name.rpartition(".")[2]
        read_here = f"self.{name}" in config_text or f"self.{last}" in config_text
        assert f".{last}" in text or read_here, f"{name} is never used"


def test_a_run_folder_in_the_place_of_a_file_proposes_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"give '.*config\.toml'"):
        load_config(tmp_path)


def test_a_suite_that_is_no_list_is_told_how_to_be_one() -> None:
    tree = {"model": {"name": "m"}, "task": {"name": "arithmetic"}}
    with pytest.raises(ConfigError, match=r'evaluation.suite is a list: write .* = \["x"\]'):
        parse_config({**tree, "evaluation": {"every": 1, "suite": "x"}})
