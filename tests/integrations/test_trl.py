"""P3OTrainer in TRL: its gradients are those of our own trainer, on the same tokens."""

import importlib
import importlib.metadata
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import forked
from tests.support.ranks import trl_worker
from tests.support.trl_cases import (
    Sampler,
    Step,
    difference,
    make_trainer,
    own_gradient,
    train,
)
from tests.test_docs import DOCS, code_blocks

import trustbatch.integrations.trl
from trustbatch.errors import ConfigError, DivergedError
from trustbatch.integrations.step_totals import as_objective
from trustbatch.objectives import P3O, build_objective

ROUNDING = 2e-5
"""of float32, relative to the norm of a gradient"""


def accumulated(number: int, **settings: Any) -> dict[str, Any]:
    """16 completions per optimizer step in so many micro-batches."""
    return {
        "gradient_accumulation_steps": number,
        "per_device_train_batch_size": 16 // number,
        **settings,
    }


def count_forward_passes(trainer: Any) -> list[bool]:
    """Return a list that gets, for each forward pass, whether it has a gradient."""
    passes: list[bool] = []
    compute = trainer._get_per_token_logps_and_entropies

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes.append(torch.is_grad_enabled())
        return compute(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = counted
    return passes


@pytest.mark.parametrize(
    ("objective", "number"), [("p3o", 1), ("p3o", 2), ("p3o", 4), ("m2po", 2), ("gspo", 4)]
)
def test_gradients_are_ours_for_any_accumulation(
    objective: str, number: int, tiny_folder: Path, tmp_path: Path
) -> None:
    """The second step of a generation is off-policy: 1-ESS is then far from 0."""
    trainer = make_trainer(
        tiny_folder,
        tmp_path,
        objective=objective,
        settings=accumulated(number, steps_per_generation=2 * number),
    )
    steps = train(trainer)
    assert len(steps) == 2
    for step in steps:
        assert len(step.inputs) == number
        expected = own_gradient(step, as_objective(objective), tiny_folder)
        assert difference(step.gradient, expected) < ROUNDING
    assert trainer.state.log_history[0]["one_minus_ess"] < 1e-6
    assert trainer.state.log_history[1]["one_minus_ess"] > 0.01


@pytest.mark.parametrize(
    "objective", ["p3o", "two_anchor", {"name": "grpo", "clip_high": 0.28}, P3O(kl="k3")], ids=str
)
def test_with_recorded_log_probs_the_ratio_is_to_them(
    objective: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    """Another policy samples, at another temperature; a third of the tokens are a tool's."""
    sampler = Sampler(tiny_folder, with_replies=True)
    trainer = make_trainer(
        tiny_folder,
        tmp_path,
        objective=objective,
        rollout_func=sampler,
        settings=accumulated(2, max_steps=1),
    )
    (step,) = train(trainer)
    assert "tool_mask" in step.inputs[0]
    expected = own_gradient(step, as_objective(objective), tiny_folder)
    assert difference(step.gradient, expected) < ROUNDING
    log = trainer.state.log_history[0]
    assert log["one_minus_ess"] > 0.01
    assert log["ledger/engine/one_minus_ess"] == pytest.approx(log["one_minus_ess"], rel=1e-4)
    assert log["ledger/engine/share"] == pytest.approx(1.0)


def test_temperature_reference_and_entropy_mean_what_they_do_here(
    tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(
        tiny_folder,
        tmp_path,
        settings=accumulated(
            2, beta=0.1, entropy_coef=0.02, temperature=0.7, mask_truncated_completions=True
        ),
    )
    steps = train(trainer)
    own = build_objective("p3o", reference_kl_coef=0.1, entropy_coef=0.02)
    assert trainer.objective == own.resolved(has_top_logp=False)
    for step in steps:
        rows = torch.cat([batch["completion_mask"].sum(1) for batch in step.inputs])
        assert (rows == 0).any(), "some completions are masked"
        expected = own_gradient(step, own, tiny_folder, temperature=0.7)
        assert difference(step.gradient, expected) < ROUNDING
    assert trainer.state.log_history[1]["kl/reference"] > 0


def test_a_step_may_span_several_generations(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_folder, tmp_path, settings=accumulated(4, steps_per_generation=2, max_steps=1)
    )
    (step,) = train(trainer)
    assert len(step.inputs) == 4
    assert difference(step.gradient, own_gradient(step, P3O(), tiny_folder)) < ROUNDING


def test_there_is_no_pre_pass_where_the_totals_are_known(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, tmp_path, settings=accumulated(2))
    passes = count_forward_passes(trainer)
    trainer.train()
    assert passes == [True] * 4  # two steps of two micro-batches


def test_there_is_one_where_they_are_not(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_folder, tmp_path, settings=accumulated(2, num_iterations=2, max_steps=2)
    )
    passes = count_forward_passes(trainer)
    trainer.train()
    old, first, second = [False], [True] * 2, [False, False, True, True]
    assert passes == old + first + second


def test_vcpo_lowers_the_learning_rate_of_one_step(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_folder,
        tmp_path,
        objective="vcpo",
        rollout_func=Sampler(tiny_folder),
        settings=accumulated(2, lr_scheduler_type="constant"),
    )
    steps = train(trainer)
    for step, log in zip(steps, trainer.state.log_history, strict=False):
        assert log["learning_rate/factor"] < 0.99
        assert step.learning_rate == pytest.approx(5e-3 * log["learning_rate/factor"])
        assert log["learning_rate"] == 5e-3


@pytest.mark.slow
def test_gradients_are_ours_on_two_ranks(tiny_folder: Path, tmp_path: Path) -> None:
    forked.in_ranks(2, trl_worker.main, str(tiny_folder), str(tmp_path))
    for objective in trl_worker.OBJECTIVES:
        of_ranks = [
            [Step(**step) for step in torch.load(tmp_path / f"{objective}-{rank}.pt")]
            for rank in range(2)
        ]
        assert len(of_ranks[0]) == 2
        for one, other in zip(*of_ranks, strict=True):
            torch.testing.assert_close(one.gradient, other.gradient)
            one.inputs += other.inputs
            expected = own_gradient(one, as_objective(objective), tiny_folder)
            assert difference(one.gradient, expected) < ROUNDING
        log = torch.load(tmp_path / f"{objective}-0-log.pt")
        assert log["one_minus_ess"] > 0.01
        assert log["loss"] == pytest.approx(log["policy/loss"], rel=1e-5)


def test_a_tiny_model_learns(tiny_folder: Path, tmp_path: Path) -> None:
    def sevens(completions: list[str], **_: Any) -> list[float]:
        return [text.count("7") / max(len(text), 1) for text in completions]

    trainer = make_trainer(tiny_folder, tmp_path, settings=accumulated(2, max_steps=12))
    trainer.reward_funcs = [sevens]
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    assert sum(rewards[:2]) / 2 < 0.4
    assert sum(rewards[-3:]) / 3 > 0.8


def test_a_run_continues_from_a_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    settings = accumulated(2, save_strategy="steps", save_steps=1)
    make_trainer(tiny_folder, tmp_path, settings=settings | {"max_steps": 1}).train()
    assert "P3O" in (tmp_path / "README.md").read_text()
    trainer = make_trainer(tiny_folder, tmp_path, settings=settings)
    trainer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in trainer.state.log_history if "ess" in line] == [1, 2]


def test_an_evaluation_has_its_loss_and_metrics(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, tmp_path, settings={"per_device_eval_batch_size": 16})
    found = trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert found["eval_loss"] == pytest.approx(found["eval_policy/loss"], abs=1e-6)
    assert found["eval_one_minus_ess"] == 0


def test_a_loss_that_is_not_finite_never_reaches_the_optimizer(
    tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_folder, tmp_path, settings=accumulated(2))
    before = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    score = trainer._generate_and_score_completions

    def with_nan(inputs: Any) -> Any:
        return score(inputs) | {"advantages": torch.full((16,), torch.nan)}

    trainer._generate_and_score_completions = with_nan
    with pytest.raises(DivergedError, match="lower the learning rate"):
        trainer.train()
    for name, each in trainer.model.state_dict().items():
        assert torch.equal(each, before[name])


def test_a_policy_that_becomes_random_is_warned_of_once(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tiny_folder, tmp_path)
    for entropy in (0.5, 0.9, 1.6, 2.0):
        trainer._step_log.write({"entropy": entropy})
    (record,) = [each for each in caplog.records if each.name.startswith("trustbatch")]
    assert record.levelno == logging.WARNING
    assert "from 0.5 to 1.6 nats" in record.getMessage()
    assert "Lower temperature or learning_rate." in record.getMessage()


@pytest.mark.parametrize(
    ("settings", "objective", "words"),
    [
        ({"epsilon_high": 0.28}, "p3o", "epsilon_high = 0.28 is a setting of TRL's own losses"),
        ({"loss_type": "dr_grpo"}, "p3o", "remove it"),
        ({"top_entropy_quantile": 0.2}, "p3o", "top_entropy_quantile"),
        ({"off_policy_mask_threshold": 0.1}, "p3o", "off_policy_mask_threshold"),
        ({"entropy_coef": -0.1}, "p3o", "entropy_coef must be a number at least 0"),
        ({}, {"name": "p3o", "kl": "top_k"}, 'set kl to "importance"'),
        ({}, {"name": "p3o", "reference_kl_coef": 0.1}, "set beta in its configuration"),
        ({}, "p30", "did you mean 'p3o'"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    settings: dict[str, Any], objective: Any, words: str, tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_trainer(tiny_folder, tmp_path, objective=objective, settings=settings)


def test_truncation_that_nobody_records_is_warned_of(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tiny_folder, tmp_path)
    assert "top_p" not in caplog.text
    make_trainer(tiny_folder, tmp_path, settings={"top_p": 0.9})
    assert "TRL records its log-probs with vLLM only" in caplog.text


@pytest.mark.parametrize(("installed", "words"), [("1.17.0", "and 1.17.0 is"), (None, "not inst")])
def test_another_version_of_trl_is_refused(
    installed: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match=rf"{words}.*pip install 'trustbatch\[trl\]'"):
        importlib.reload(trustbatch.integrations.trl)


def test_with_truncation_the_anchor_is_the_model(tiny_folder: Path, tmp_path: Path) -> None:
    """Where the engine recorded truncated log-probs, P3O's KL is to the trainer at generation."""
    sampler = Sampler(tiny_folder)
    settings = accumulated(2, max_steps=1, top_p=0.9)
    trainer = make_trainer(tiny_folder, tmp_path, rollout_func=sampler, settings=settings)
    train(trainer)
    log = trainer.state.log_history[0]
    # the policy has not moved since, so the KL to it is 0 and that to the sampler is not
    assert log["kl/penalty"] == pytest.approx(0.0, abs=1e-5) != log["kl/behavior"]
    assert "ledger/sampling_and_engine/share" in log


def test_the_page_s_script_trains(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is written, but for the model and the size; then with the line that measures."""
    monkeypatch.chdir(tmp_path)
    page = DOCS / "integrations" / "trl.md"
    script, measuring = code_blocks(page, "python")
    settings = 'max_steps=2, use_cpu=True, bf16=False, report_to="none", logging_steps=1'
    for old, new in {"Qwen/Qwen3-0.6B": str(tiny_folder), "max_steps=200": settings}.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    names: dict[str, Any] = {}
    exec(script, names)
    assert names["trainer"].state.log_history[0]["one_minus_ess"] == 0
    exec(
        script.replace("P3OTrainer", "GRPOTrainer")
        .replace("trustbatch.integrations.trl", "trl")
        .replace("trainer.train()", measuring + "trainer.train()"),
        names,
    )
    assert names["trainer"].state.log_history[0]["one_minus_ess"] == 0
