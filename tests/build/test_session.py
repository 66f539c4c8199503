"""Every setting of a run reaches the code that it is meant for."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.own_task import Digits
from tests.support.processes import command_line
from tests.support.rollout_files import read_rollouts, rollout_file
from tests.support.sessions import train_session

import trustbatch
from trustbatch import api
from trustbatch.advantages import ADVANTAGES
from trustbatch.build import session as session_module
from trustbatch.build.session import build_session
from trustbatch.checkpoints.load import optimizer_state_of
from trustbatch.config import Config, parse_config
from trustbatch.config.objective import AdvantageConfig
from trustbatch.errors import CheckpointError, ConfigError, DivergedError, RewardError
from trustbatch.rollout import sampling
from trustbatch.training.logprobs import EntropyUse, _entropy
from trustbatch.training.optimizer import build_optimizer, learning_rate_factor
from trustbatch.training.trainer import Trainer
from trustbatch.types import Prompt
from trustbatch.utils.worker_pool import WorkerPool


def config_of(tiny_folder: Path, folder: Path, **tables: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"name": str(tiny_folder)},
        "task": {"name": "arithmetic", "level": 1},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 3, "max_tokens": 3},
        "training": {"steps": 4, "learning_rate": 1e-3},
        "run": {"folder": str(folder)},
    }
    for name, table in tables.items():
        base[name] = {**base[name], **table} if name in base else table
    return parse_config(base)


def test_rollout_settings_reach_the_engine(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 5,
        "top_logprobs": 3,
        "logprob_mode": "raw",
        "max_tokens": 2,
    }
    session = build_session(config_of(tiny_folder, tmp_path, rollout=settings, seed=5))
    for name, value in settings.items():
        assert getattr(session.sampling, name) == value
    assert session.sampling.stop_token_ids == session.policy.stop_token_ids
    assert session.engine.seed == session.trainer.seed == 5  # type: ignore[attr-defined]
    session.run.close()


def test_training_settings_reach_the_trainer(tiny_folder: Path, tmp_path: Path) -> None:
    session = build_session(
        config_of(
            tiny_folder,
            tmp_path,
            training={"policy_temperature": "rollout", "weight_decay": 0.3, "betas": [0.5, 0.6]},
            rollout={"temperature": 0.7, "max_sequences": 7},
            objective={"name": "grpo", "reference_kl_coef": 0.1},
        )
    )
    trainer = session.trainer
    assert trainer.policy_temperature == 0.7
    assert trainer.reference is not None
    assert trainer.reference.model is not trainer.policy.model
    group = trainer.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.6), 0.3)
    assert session.engine.max_sequences == 7  # type: ignore[attr-defined]
    session.run.close()


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}])
def test_moments_exist_before_the_engines(
    model: dict[str, Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they would otherwise lie in the middle of what a rollout needs."""
    trainers: list[Trainer] = []
    found: list[list[str]] = []
    build_trainer, open_engines = session_module.build_trainer, session_module.open_engines

    def building(*args: Any) -> Trainer:
        trainers.append(build_trainer(*args))
        return trainers[-1]

    def opening(*args: Any, **kwargs: Any) -> Any:
        found.append(list(optimizer_state_of(trainers[-1])))
        return open_engines(*args, **kwargs)

    monkeypatch.setattr(session_module, "build_trainer", building)
    monkeypatch.setattr(session_module, "open_engines", opening)
    session = build_session(config_of(tiny_folder, tmp_path, model=model))
    names = [name for name, _ in session.policy.trained_parameters()]
    assert found == [
        [f"{key}/{name}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")]
    ]
    assert not any(bool(each.any()) for each in optimizer_state_of(session.trainer).values())
    session.close()


def test_the_schedule_reaches_the_optimizer(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"steps": 5, "warmup_fraction": 0.4, "learning_rate": 0.01}
    session = build_session(config_of(tiny_folder, tmp_path, training=settings))
    seen: list[float] = []
    step = session.trainer.optimizer.step

    def recording(*args: Any, **kwargs: Any) -> Any:
        seen.append(session.trainer.optimizer.param_groups[0]["lr"])
        return step(*args, **kwargs)

    session.trainer.optimizer.step = recording  # type: ignore[method-assign]
    train_session(session)
    expected = [
        0.01 * learning_rate_factor(i, 5, warmup_fraction=0.4, schedule="cosine") for i in range(5)
    ]
    assert seen == pytest.approx(expected)
    assert len(set(seen)) > 2


def test_adamw_by_hand() -> None:
    # first step: m = 0.1 g, v = 0.05 g^2, both divided by the same factors again: w moves by
    # lr * (sign(g) + decay * w)
    parameter = torch.nn.Parameter(torch.tensor([2.0, -3.0]))
    optimizer = build_optimizer("adamw", [parameter], betas=(0.9, 0.95), weight_decay=0.01)
    optimizer.param_groups[0]["lr"] = 0.1
    parameter.grad = torch.tensor([5.0, -7.0])
    optimizer.step()
    expected = torch.tensor([2.0 - 0.1 * (1 + 0.02), -3.0 - 0.1 * (-1 - 0.03)])
    torch.testing.assert_close(parameter.data, expected)


@pytest.mark.parametrize("name", ["group_centered", "leave_one_out", "group_quantile"])
def test_the_named_advantage_is_used(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    class Lengths:
        name = "lengths"

        def prompt(self, index: int) -> Prompt:
            return Prompt(id=str(index), text="1+1=", answer="")

        def grade(self, prompt: Prompt, completion: str) -> float:
            return float(sum(map(ord, completion)))

    config = config_of(tiny_folder, tmp_path, advantage={"name": name})
    session = build_session(config, Lengths())
    train_session(session)
    rows = read_rollouts(rollout_file(tmp_path / "run", 1))
    rewards = torch.tensor([row["reward"] for row in rows]).reshape(2, 3)
    expected = ADVANTAGES[name](rewards).flatten().tolist()
    assert [row["advantage"] for row in rows] == pytest.approx(expected)
    assert any(expected)


def test_options_of_an_advantage_reach_its_function() -> None:
    rewards = torch.tensor([[0.0, 1.0, 2.0, 5.0]])
    options = {"quantile": 0.25, "epsilon": 0.5}
    config = AdvantageConfig.model_validate({"name": "group_quantile", **options})
    expected = ADVANTAGES["group_quantile"](rewards, **options)
    assert torch.equal(config.build()(rewards), expected)


def test_a_position_has_its_own_random_number(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions: list[int] = []
    original = sampling.uniforms

    def recording(keys: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
        positions.append(int(torch.as_tensor(position).unique()))  # all rows are as far
        return original(keys, position)

    monkeypatch.setattr(sampling, "uniforms", recording)
    session = build_session(
        config_of(tiny_folder, tmp_path, training={"steps": 1}, rollout={"canary_every": 0})
    )
    train_session(session)
    assert positions == list(range(len(positions)))
    assert len(positions) > 1


def test_a_model_table_can_be_given_from_python(tiny_folder: Path, tmp_path: Path) -> None:
    result = trustbatch.train(
        model={"name": str(tiny_folder), "device": "cpu", "precision": "bfloat16"},
        task="arithmetic",
        rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 3},
        training={"steps": 1},
        run={"folder": str(tmp_path)},
    )
    assert 'precision = "bfloat16"' in (result.folder / "config.toml").read_text()
    # low precision shows: engine and trainer round differently
    assert result.metrics[0]["one_minus_ess"] < 1e-2


def test_a_grader_that_raises_is_named_with_its_prompt(tiny_folder: Path, tmp_path: Path) -> None:
    class Broken:
        name = "broken"

        def prompt(self, index: int) -> Prompt:
            return Prompt(id=f"p{index}", text="1+1=", answer="")

        def grade(self, prompt: Prompt, completion: str) -> float:
            return 1 / 0

    config = config_of(tiny_folder, tmp_path, reward={"ungraded": "stop"})
    session = build_session(config, Broken())
    with pytest.raises(RewardError, match="task broken failed on prompt 'p0': ZeroDivision"):
        train_session(session)


def test_a_diverged_policy_ends_in_a_sentence(tiny_folder: Path, tmp_path: Path) -> None:
    session = build_session(config_of(tiny_folder, tmp_path))
    with torch.no_grad():
        next(session.policy.model.parameters()).fill_(math.nan)
    with pytest.raises(DivergedError, match="lower"):
        train_session(session)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The grading processes that have been started ahead."""
    found: list[int] = []
    start = WorkerPool.start

    def noting(self: WorkerPool, num_items: int) -> None:
        start(self, num_items)
        found.extend(process._process.pid for process in self._processes)

    monkeypatch.setattr(WorkerPool, "start", noting)
    return found


def test_graders_load_while_the_session_is_built(
    tiny_folder: Path, tmp_path: Path, started: list[int]
) -> None:
    settings = {"prompts_per_step": 1, "samples_per_prompt": 3}
    config = config_of(tiny_folder, tmp_path, rollout=settings, reward={"workers": 5})
    session = build_session(config, Digits())
    assert len(started) == 3
    assert all(map(command_line, started))
    train_session(session)
    pools = session.scorer._pools  # type: ignore[attr-defined]
    assert [process._process.pid for process in pools["terms"]._processes] == started
    session.close()
    assert not any(map(command_line, started))


@pytest.mark.parametrize(
    ("part", "error"),
    [("load_model", ConfigError), ("_assemble", KeyboardInterrupt)],
)
def test_a_session_that_can_not_be_built_leaves_no_grader(
    part: str,
    error: type[BaseException],
    tiny_folder: Path,
    tmp_path: Path,
    started: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: Any) -> None:
        assert all(map(command_line, started))
        raise error("not today")

    monkeypatch.setattr(session_module, part, failing)
    with pytest.raises(error, match="not today"):
        build_session(config_of(tiny_folder, tmp_path), Digits())
    assert started
    assert not any(map(command_line, started))


def test_a_run_that_ends_before_its_first_step_leaves_no_grader(
    tiny_folder: Path, tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "_announce", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.train_config(config_of(tiny_folder, tmp_path), Digits())
    assert started
    assert not any(map(command_line, started))


def test_two_processes_do_not_share_a_run_folder(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_folder, tmp_path)
    session = build_session(config)
    with pytest.raises(ConfigError, match="Another process is training in"):
        build_session(config)
    session.run.close()
    train_session(build_session(config))


def test_a_start_that_failed_binds_nobody(tiny_folder: Path, tmp_path: Path) -> None:
    session = build_session(config_of(tiny_folder, tmp_path, rollout={"max_tokens": 127}))
    with pytest.raises(ConfigError, match="lower max_tokens"):
        train_session(session)
    train_session(build_session(config_of(tiny_folder, tmp_path, rollout={"max_tokens": 3})))


def test_micro_batch_trust_fixes_the_division_of_work(tiny_folder: Path, tmp_path: Path) -> None:
    objective = {"name": "p3o", "ess_scope": "micro_batch"}
    train_session(build_session(config_of(tiny_folder, tmp_path, objective=objective)))
    changed = config_of(
        tiny_folder, tmp_path, objective=objective, training={"micro_batch_tokens": 64}
    )
    with pytest.raises(ConfigError, match=r"training\.micro_batch_tokens was 4096, now 64"):
        build_session(changed)


@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "config.json", "trainer/state.json", "trainer/pending_rollouts.jsonl"],
)
def test_any_damaged_file_of_a_checkpoint_is_named(
    tiny_folder: Path, tmp_path: Path, file: str
) -> None:
    config = config_of(tiny_folder, tmp_path, rollout={"lag": 1}, run={"checkpoint_every": 3})
    train_session(build_session(config))
    checkpoints = tmp_path / "run" / "checkpoints"
    # the newest one has no rollouts waiting: look at the one before it
    (checkpoints / "step-4").rename(checkpoints / ".gone")
    damaged = checkpoints / "step-3" / file
    damaged.write_bytes(damaged.read_bytes()[: max(damaged.stat().st_size // 2, 1)])
    with pytest.raises(CheckpointError, match=rf"step-3: {file} has"):
        build_session(config)


def test_a_cut_config_file_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_folder, tmp_path)
    train_session(build_session(config))
    (tmp_path / "run" / "config.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match=r"config\.toml can't be read"):
        build_session(config)


def test_entropy_of_a_policy_that_excludes_a_token() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    entropy = _entropy(logits, logits.logsumexp(-1), EntropyUse.LEARNED)
    assert entropy is not None
    assert float(entropy.detach()) == pytest.approx(math.log(2))
    entropy.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_published_generation_configs_can_be_saved(tiny_folder: Path, tmp_path: Path) -> None:
    from trustbatch.models.policy import Policy

    policy = Policy.load(str(tiny_folder))
    policy.model.generation_config.temperature = 0.6
    policy.model.generation_config.do_sample = False
    again = Policy(policy.model, policy.tokenizer, name="x", precision="float32")
    again.save(tmp_path / "saved")
    assert Policy.load(str(tmp_path / "saved")).model.generation_config.temperature == 0.6


def test_metrics_are_on_the_disk_before_a_checkpoint_is_written(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = build_session(config_of(tiny_folder, tmp_path))
    done: list[str] = []
    save, fsync = session.checkpointer.save, os.fsync

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            done.append("metrics")

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(session.checkpointer, "save", lambda s: (done.append("save"), save(s)))
    train_session(session)
    assert done
    assert done[::2] == ["metrics"] * (len(done) // 2)
    assert done[1::2] == ["save"] * (len(done) // 2)
