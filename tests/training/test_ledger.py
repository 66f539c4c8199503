"""The ledger: parts add up to the log-ratio, and a planted cause is found in its own column."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.own_task import Codes
from tests.support.rollout_files import read_rollouts, rollout_file, rollout_text
from tests.support.sessions import train_session
from torch import Tensor

import trustbatch
from trustbatch.build.session import build_session
from trustbatch.config import parse_config
from trustbatch.loops.session import Session
from trustbatch.models.tiny import build_model, build_tokenizer
from trustbatch.training import observation
from trustbatch.training.ledger import CAUSES, Ledger

TWO_PASSES = {"passes": 2, "mini_batches": 2}


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "other"
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tables(
    model: Path, folder: Path, *, training: dict[str, Any] | None = None, **rollout: Any
) -> dict[str, Any]:
    return {
        "model": {"name": str(model), "device": "cpu"},
        "task": Codes(),
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 6, **rollout},
        "training": {"steps": 4, "learning_rate": 2e-3, **(training or {})},
        "run": {"folder": str(folder), "ledger_every": 1, "rollouts_every": 1},
    }


def ledger_of(metrics: dict[str, float], what: str = "one_minus_ess") -> dict[str, float]:
    found = {cause: metrics.get(f"ledger/{cause}/{what}") for cause in CAUSES}
    return {cause: value for cause, value in found.items() if value is not None}


def train(model: Path, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    tree = tables(model, folder, **settings)
    return trustbatch.train(objective=tree.pop("objective", "grpo"), **tree).metrics


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.3, "training": TWO_PASSES},
        {"top_p": 0.8, "lag": 2},
        {"temperature": 1.3, "top_k": 5, "lag": 1, "precision": "fp8", "training": TWO_PASSES},
        {"dynamic_sampling": True, "max_sampling_rounds": 2, "temperature": 1.3},
    ],
)
def test_parts_add_up_to_the_log_ratio_of_every_token(
    settings: dict[str, Any],
    tiny_folder: Path,
    other_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    differences: list[float] = []
    original = Ledger.parts

    def checked(self: Ledger, tokens: Any, batch: Any, initial: Tensor) -> dict[str, Tensor]:
        parts = original(self, tokens, batch, initial)
        total = torch.stack(list(parts.values())).sum(0)
        log_ratio = tokens.logp.detach().double() - tokens.behavior_logp.double()
        differences.append(float((total - log_ratio).abs().max()))
        return parts

    monkeypatch.setattr(Ledger, "parts", checked)
    policies = [{"model": str(other_folder), "share": 0.25, "name": "other"}]
    metrics = train(tiny_folder, tmp_path, policies=policies, **settings)
    assert len(differences) >= 4
    assert max(differences) < 1e-9
    for line in metrics:
        shares = ledger_of(line, "share")
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-9)


def test_a_run_that_is_on_policy_has_nothing_to_report(tiny_folder: Path, tmp_path: Path) -> None:
    for line in train(tiny_folder, tmp_path):
        assert ledger_of(line).keys() == {"sampling", "engine", "updates"}
        assert max(ledger_of(line).values()) < 1e-9


@pytest.mark.parametrize(
    ("cause", "settings"),
    [
        ("sampling", {"temperature": 1.3}),
        ("sampling", {"top_p": 0.7}),
        ("lag", {"lag": 2}),
        ("engine", {"precision": "fp8"}),
        ("updates", {"training": {"mini_batches": 4}}),
        ("updates", {"training": {"passes": 2}}),
    ],
)
def test_a_planted_cause_is_found_in_its_own_column(
    cause: str, settings: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    last = train(tiny_folder, tmp_path, **settings)[-1]
    found = ledger_of(last)
    size = found.pop(cause)
    means = ledger_of(last, "ratio_mean")
    assert size > 1e-7 or abs(means[cause] - 1.0) > 1e-3
    assert max(found.values()) < 1e-9
    assert ledger_of(last, "share")[cause] == pytest.approx(1.0, abs=1e-3)
    if cause != "updates":  # the means of several optimizer steps
        assert size == pytest.approx(last["one_minus_ess"], rel=1e-3, abs=1e-9)


def test_another_policy_is_a_cause_of_its_own(
    tiny_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    policies = [{"model": str(other_folder), "share": 0.5, "name": "other", "temperature": 1.5}]
    found = ledger_of(train(tiny_folder, tmp_path, policies=policies)[-1])
    assert found["other_policies"] > 1e-3
    assert found["sampling"] > 1e-4  # of the other policy, by its temperature
    assert max(found["engine"], found["updates"]) < 1e-9


@contextmanager
def perturbed(session: Session, layer: int) -> Iterator[None]:
    """Another layer while the engine samples, as after a weight update that went wrong."""
    weight = session.policy.model.get_submodule(f"model.layers.{layer}.mlp.down_proj").weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.5)
    yield
    with torch.no_grad():
        weight.copy_(before)


def test_a_layer_that_is_wrong_in_the_engine_is_the_engines(
    tiny_folder: Path, tmp_path: Path
) -> None:
    tree = tables(tiny_folder, tmp_path, canary_every=0, temperature=1.3)
    task = tree.pop("task")
    session = build_session(parse_config({**tree, "task": {"name": "arithmetic"}}), task)
    generate: Callable[..., Any] = session.engine.generate

    def generate_wrongly(requests: Any) -> Any:
        with perturbed(session, 0):
            return generate(requests)

    session.engine.generate = generate_wrongly  # type: ignore[method-assign]
    session.canary.at_start = lambda **_: None  # type: ignore[method-assign]
    found = ledger_of(train_session(session))
    assert found["engine"] > 1e-4
    assert found["sampling"] > 1e-4
    assert found["updates"] < 1e-9


def test_without_the_models_own_log_probs_causes_are_not_guessed(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trustbatch.rollout.native.info.INFO.records_anchor_freely", False)
    found = ledger_of(train(tiny_folder, tmp_path, temperature=1.3)[-1])
    assert found["sampling_and_engine"] > 1e-3
    assert found["sampling"] == found["engine"] == 0.0


def test_the_ledger_is_due_at_the_first_step_and_then_every_few(
    tiny_folder: Path, tmp_path: Path
) -> None:
    tree = tables(tiny_folder, tmp_path, training={"steps": 5})
    tree["run"]["ledger_every"] = 3
    metrics = trustbatch.train(**tree).metrics
    assert [bool(ledger_of(line)) for line in metrics] == [True, False, True, False, False]
    tree["run"] |= {"ledger_every": 0, "name": "without"}
    assert not any(ledger_of(line) for line in trustbatch.train(**tree).metrics)


def test_a_ledger_changes_nothing_that_is_computed(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"temperature": 1.3, "lag": 1, "training": TWO_PASSES}
    lines = []
    for every in (1, 0):
        tree = tables(tiny_folder, tmp_path, **settings)
        tree["run"] |= {"ledger_every": every, "name": f"every-{every}"}
        lines.append(trustbatch.train(objective="pact", **tree).metrics)
    left_out = ("time/", "ledger/")
    with_ledger, without = (
        [{k: v for k, v in line.items() if not k.startswith(left_out)} for line in metrics]
        for metrics in lines
    )
    assert with_ledger == without


def test_bins_hold_all_tokens(tiny_folder: Path, tmp_path: Path) -> None:
    last = train(tiny_folder, tmp_path, temperature=1.5)[-1]
    positions = {key for key in last if key.startswith("ledger/position/")}
    assert positions == {f"ledger/position/0-15/{what}" for what in ("one_minus_ess", "ratio_mean")}
    assert last["ledger/position/0-15/one_minus_ess"] == pytest.approx(last["one_minus_ess"])
    unlikely = last["ledger/probability/0.01-0.1/ratio_mean"]
    likely = last["ledger/probability/0.1-0.5/ratio_mean"]
    assert unlikely < 1.0 < likely  # what T > 1 does


def test_token_records_hold_what_the_objective_saw(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"temperature": 1.3, "training": {"mini_batches": 2, "learning_rate": 3e-3}}
    tree = tables(tiny_folder, tmp_path, **settings)
    result = trustbatch.train(objective="grpo", **tree)
    rows = read_rollouts(rollout_file(result.folder, 4))
    assert len(rows) == 16
    moved = 0.0
    for row in rows:
        lists = {name: row[name] for name in row if isinstance(row[name], list)}
        assert {len(each) for each in lists.values()} == {row["tokens"]}
        special = ("</s>", "<pad>")
        assert row["completion"] == "".join(each for each in row["token"] if each not in special)
        for behavior, policy, ratio, weight in zip(
            *(row[name] for name in ("behavior_logp", "policy_logp", "ratio", "weight")),
            strict=True,
        ):
            moved = max(moved, abs(math.log(ratio) - (policy - behavior)))
            if row["advantage"] == 0:
                assert weight is None
            else:
                is_clipped = ratio > 1.2 if row["advantage"] > 0 else ratio < 0.8
                assert weight == pytest.approx(0.0 if is_clipped else ratio, abs=2e-3)
    assert moved > 1e-3  # the second mini-batch is trained on after an update


def test_a_token_that_can_not_be_measured_is_null_in_the_record(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = observation._columns

    def broken(*arguments: Any) -> dict[str, Tensor]:
        columns = original(*arguments)
        columns["ratio"][::2] = torch.nan
        return columns

    monkeypatch.setattr(observation, "_columns", broken)
    result = trustbatch.train(**tables(tiny_folder, tmp_path, training={"steps": 1}))
    text = rollout_text(rollout_file(result.folder, 1))
    assert "NaN" not in text
    assert '"ratio": [null' in text


def test_what_is_logged_is_bounded(tiny_folder: Path, tmp_path: Path) -> None:
    tree = tables(tiny_folder, tmp_path, training={"steps": 8})
    tree["run"] |= {"rollouts_logged": 5, "tokens_logged": 20}
    result = trustbatch.train(**tree)
    rows = read_rollouts(rollout_file(result.folder, 8))
    assert len(rows) == 8  # two groups, whole
    with_tokens = [row for row in rows if "token" in row]
    assert 0 < len(with_tokens) < 8
    assert sum(len(row["token"]) for row in with_tokens) <= 20


def test_a_full_folder_of_completions_is_thinned(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tables(tiny_folder, tmp_path, training={"steps": 8})
    first = trustbatch.train(
        **tree | {"training": {"steps": 1}, "run": tree["run"] | {"name": "1"}}
    )
    size = rollout_file(first.folder, 1).stat().st_size
    monkeypatch.setattr("trustbatch.observe.run_folder.MEGABYTE", size * 3 / 256)
    files = sorted(path.name for path in (trustbatch.train(**tree).folder / "rollouts").iterdir())
    assert 3 <= len(files) <= 5
    assert files[0].startswith("step-000001")
    assert files[-1].startswith("step-000008")
