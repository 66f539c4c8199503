"""`trustbatch inspect`: the run's own batch and gradient, bit for bit, and an untouched folder."""

import gzip
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.chromium import PROGRAM, chromium
from tests.support.sessions import train_session
from tests.support.training_cases import policy_logp

import trustbatch
from trustbatch.batching.sequences import to_sequences
from trustbatch.build.session import build_session
from trustbatch.cli import main
from trustbatch.config import parse_config
from trustbatch.errors import ConfigError
from trustbatch.inspection.examine import Request, inspect_run
from trustbatch.inspection.reopen import reopened
from trustbatch.inspection.result import Inspection
from trustbatch.inspection.steps import find_steps
from trustbatch.inspection.token_summary import TokenCollector
from trustbatch.observe.run_folder import read_metrics
from trustbatch.rewards import rewards_of
from trustbatch.training.trainer import Trainer
from trustbatch.utils.files import lock_folder

SHORT = "tests.support.own_task:Short"
HOSTILE = "<img src=x onerror=alert(1)>"
MINE = """
from dataclasses import dataclass
from trustbatch.objectives import Objective

@dataclass(frozen=True, kw_only=True)
class Half(Objective):
    '''Half of REINFORCE.'''

    def policy_loss(self, tokens, totals):
        return -0.5 * totals.per_token(tokens.advantage * tokens.logp), {}

@dataclass(frozen=True, kw_only=True)
class Broken(Objective):
    def policy_loss(self, tokens, totals):
        raise KeyError("no such field")
"""


def tree(initial: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "model": {"name": str(initial), "device": "cpu"},
        "task": {"name": SHORT},
        "objective": {"name": "grpo"},
        "rollout": {
            "prompts_per_step": 6,
            "samples_per_prompt": 4,
            "max_tokens": 6,
            "temperature": 1.3,
        },
        # a clip would scale the gradient
        "training": {"steps": 3, "learning_rate": 1e-2, "gradient_clip": 1e9},
        "run": {"folder": str(folder), "checkpoint_every": 1, "keep_checkpoints": 9},
    }
    for key, value in changes.items():
        tables[key] = {**tables[key], **value} if key in tables else value
    return tables


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every path below a folder, with its time of change and its bytes."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in (folder, *sorted(folder.rglob("*")))
    }


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps whose name would be a script."""
    folder = tmp_path_factory.mktemp("runs")
    logged = {"rollouts_every": 1, "rollouts_logged": 24}
    tables = tree(tiny_folder, folder, run={"name": HOSTILE, "keep_checkpoints": 2, **logged})
    return trustbatch.train(**tables).folder


def examine(folder: Path, **changes: Any) -> Inspection:
    return inspect_run(Request(folder=folder, **changes), say=lambda _: None)


def row_of(inspection: Inspection, label: str) -> Any:
    return next(row for row in inspection.rows if row.label == label)


def gradients_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in trainer.policy.trained_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},  # sampled without the log-probs that P3O uses, which must change no token
        {"objective": {"name": "p3o"}, "rollout": {"lag": 2}},
        {
            "objective": {"name": "two_anchor", "reference_kl_coef": 0.1, "entropy_coef": 0.01},
            "training": {"mini_batches": 3, "micro_batch_tokens": 40},
        },
        {"rollout": {"dynamic_sampling": True, "top_p": 0.9}, "task": {"curriculum": {"low": 0.1}}},
        {
            "model": {"lora": {"rank": 4}},
            "task": {"name": "tests.support.own_task:Chatter"},
            "rollout": {"max_tokens": 24, "max_turns": 3},
        },
    ],
    ids=[
        "grpo",
        "p3o with a lag",
        "mini-batches and a reference",
        "dynamic and a curriculum",
        "adapters in an environment",
    ],
)
def test_the_gradient_is_the_one_that_the_run_has_taken(
    tiny_folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = parse_config(tree(tiny_folder, tmp_path, **changes))
    session = build_session(config)
    taken: list[dict[str, torch.Tensor]] = []
    trainer = session.trainer
    trainer.optimizer.register_step_pre_hook(lambda *_: taken.append(gradients_of(trainer)))
    train_session(session)
    session.close()
    steps = find_steps(config.run.path)
    assert steps.checkpoints.keys() >= {1, 2, 3}
    num_steps = config.training.mini_batches
    for step in (1, 3):
        with reopened(steps.config, steps.checkpoints[step], say=lambda _: None) as again:
            groups = again.batch().groups
            sequences = to_sequences(groups, config.advantage.build()(rewards_of(groups)))
            again.trainer.first_gradient(sequences, num_steps=num_steps, observer=TokenCollector())
            found = gradients_of(again.trainer)
            assert not again.trainer.optimizer.state  # it would be twice as large as the weights
        expected = taken[(step - 1) * num_steps]
        assert any(bool(each.any()) for each in expected.values())
        for name, gradient in expected.items():
            assert torch.equal(gradient, found[name]), (step, name)


def test_all_objectives_of_a_step_and_an_untouched_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    # as if the run were under way in another process
    with lock_folder(run, in_use="never"):
        before = contents(run)
        assert main(["inspect", str(run), "--step", "3", "--json", str(file)]) == 0
        assert contents(run) == before
    out = capsys.readouterr().out
    found = json.loads(file.read_text())
    rows = {row["label"]: row for row in found["rows"]}
    assert set(rows) >= {"grpo", "p3o", "pact", "reinforce", "unclipped"}
    assert all(label in out for label in rows)
    (own,) = [row for row in found["rows"] if row["is_own"]]
    assert own["label"] == "grpo"
    # the trainer has written the same norm
    norm = next(line for line in read_metrics(run) if line["step"] == 3)["gradient/norm"]
    assert own["gradient"]["norm"] == pytest.approx(norm, rel=1e-5)
    for label, row in rows.items():
        assert row["gradient"]["cosines"][label] == pytest.approx(1.0, abs=1e-9)
        for other, value in row["gradient"]["cosines"].items():
            assert value == pytest.approx(rows[other]["gradient"]["cosines"][label], abs=1e-9)
        assert row["gradient"]["entropy_drift"] is not None
    assert rows["unclipped"]["gradient"]["drift_beyond_unclipped"]["value"] == 0.0
    # sampled at T = 1.3, so that a clip silences those two quadrants and no other
    silenced = own["tokens"]["silenced_in"]
    assert silenced["A>0, r>1"] + silenced["A<0, r<1"] == pytest.approx(own["tokens"]["silenced"])
    assert own["tokens"]["silenced"] > 0.01
    assert "grpo silences" in out
    assert "entropy" in out
    assert found["fresh"]["num_parts"] == 8
    # their own log-probs are recorded beside the sampler's, though the run had no use for them
    assert not any("pulls to the sampler" in note for note in found["notes"])


def test_fresh_rollouts_are_of_the_policy_itself_and_each_part_is_another(run: Path) -> None:
    steps = find_steps(run)
    with reopened(steps.config, steps.checkpoints[3], say=lambda _: None) as again:
        batch = again.batch()
        parts = [again.fresh_groups(batch, part) for part in (0, 1)]
        sequences = to_sequences(parts[0], torch.zeros(6, 4))
        # at the policy's temperature of 1, where the run samples at 1.3
        expected = policy_logp(again.policy, sequences)
    found = torch.cat([each.completion.behavior_logp for each in sequences])
    assert torch.allclose(found, expected, atol=1e-4)
    assert [group.prompt for group in parts[0]] == [group.prompt for group in batch.groups]
    texts = [[c.text for group in part for c in group.completions] for part in parts]
    assert texts[0] != texts[1]
    assert all(len(group.grades) == 4 for part in parts for group in part)


def test_fresh_rollouts_of_an_on_policy_batch_agree_with_it(
    tiny_folder: Path, tmp_path: Path
) -> None:
    tables = tree(tiny_folder, tmp_path, rollout={"temperature": 1.0, "samples_per_prompt": 16})
    folder = trustbatch.train(**tables).folder
    found = examine(folder, step=1, objectives=("grpo", "p3o", "reinforce"), fresh_samples=8 * 16)
    assert found.one_minus_ess < 1e-6
    assert "on-policy" in found.findings[0]
    assert found.fresh is not None
    assert found.fresh.norm is not None
    for row in found.rows:
        assert row.gradient is not None
        assert row.gradient.cosines["reinforce"] == pytest.approx(1.0, abs=1e-4)
        estimate = row.gradient.fresh_cosine
        assert estimate is not None
        assert 0.5 < estimate.value < 1.0 + 3 * estimate.standard_error


def test_a_users_own_objective_is_a_row(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_objectives.py").write_text(MINE)
    words = ("my_objectives.py:Half", "reinforce")
    found = examine(run, objectives=words, fresh_samples=0)
    mine, plain = row_of(found, words[0]).gradient, row_of(found, "reinforce").gradient
    assert mine.norm == pytest.approx(0.5 * plain.norm, rel=1e-5)
    assert mine.cosines["reinforce"] == pytest.approx(1.0, abs=1e-6)
    assert (mine.fresh_cosine, mine.entropy_drift) == (None, None)
    # the run has ended with step 3
    assert found.step == 4
    assert any("would take next" in note for note in found.notes)


def test_a_run_trains_with_a_users_own_objective(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half_objective.py").write_text(MINE)
    own = {"name": "half_objective.py:Half"}
    tables = tree(tiny_folder, tmp_path, objective=own, training={"steps": 1}, run={"name": "half"})
    folder = trustbatch.train(**tables).folder
    found = examine(folder, step=1, objectives=("reinforce",), fresh_samples=0)
    assert found.own.label == own["name"]
    # its file is as much a part of the run as the configuration is
    (tmp_path / "half_objective.py").write_text(f"{MINE}# edited")
    with pytest.raises(ConfigError, match=r"half_objective.py was edited after step-1"):
        trustbatch.train(**(tables | {"training": {**tables["training"], "steps": 2}}))


@pytest.mark.parametrize("first", [False, True])
def test_the_first_mini_batch_or_all_of_them(
    tiny_folder: Path, tmp_path: Path, first: bool
) -> None:
    tables = tree(tiny_folder, tmp_path, training={"mini_batches": 3, "steps": 1})
    folder = trustbatch.train(**tables).folder
    found = examine(folder, step=1, objectives=("grpo",), fresh_samples=0, first_mini_batch=first)
    assert any(("first of 3" if first else "on all of it") in note for note in found.notes)
    tokens = read_metrics(folder)[0]["tokens/count"]
    assert found.num_tokens < tokens if first else found.num_tokens == tokens


def test_a_batch_that_waited_has_no_log_probs_of_the_model(
    tiny_folder: Path, tmp_path: Path
) -> None:
    # the ledger would have recorded them
    tables = tree(tiny_folder, tmp_path, rollout={"lag": 1}, run={"ledger_every": 0})
    folder = trustbatch.train(**tables).folder
    found = examine(folder, objectives=("p3o",), fresh_samples=0)
    # the last batch of a run with a lag: after it there is none
    assert found.step == 3
    assert any("pulls to the sampler here: p3o" in note for note in found.notes)


def test_the_log_of_a_step_gives_the_weights_that_its_batch_gives(
    run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    again = examine(copy, step=3, fresh_samples=0)
    shutil.rmtree(copy / "checkpoints" / "step-2")
    logged = examine(copy, step=3)
    assert (again.is_logged, logged.is_logged) == (False, True)
    assert logged.num_tokens == again.num_tokens
    assert logged.one_minus_ess == pytest.approx(again.one_minus_ess, rel=1e-3)
    for row in logged.rows:
        expected = row_of(again, row.label).tokens
        assert row.tokens.silenced_in == pytest.approx(expected.silenced_in, abs=1e-9)
        assert (row.tokens.capped, row.tokens.raised) == (expected.capped, expected.raised)


def planted(advantage: float, log_ratio: float) -> dict[str, Any]:
    return {
        "advantage": advantage,
        "policy": "p",
        "version": 6,
        "token": ["<script>alert(1)</script>", "b"],
        "token_id": [5, 6],
        "behavior_logp": [-2.0, -2.0],
        "policy_logp": [-2.0 + log_ratio, -2.0],
    }


def test_a_step_whose_weights_are_gone_is_weighed_from_its_log(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    lines = [planted(1.0, 0.5), planted(-1.0, -0.5), planted(-1.0, 0.5), {"advantage": 1.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (copy / "rollouts" / "step-000007.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    found = examine(copy, step=7)
    assert found.is_logged
    assert (found.num_completions, found.num_tokens) == (3, 6)
    # of six tokens, one is right with r > 1.2 and one is wrong with r < 0.8
    assert row_of(found, "grpo").tokens.silenced == pytest.approx(2 / 6)
    assert row_of(found, "p3o").tokens.silenced == 0.0
    assert all(row.gradient is None for row in found.rows)
    assert "no gradients" in found.notes[0]
    assert "steps 1, 3, 4 can be computed again" in found.notes[0]
    page = tmp_path / "page.html"
    assert main(["inspect", str(copy), "--step", "7", "--page", str(page)]) == 0
    assert "<script>alert" not in page.read_text()


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 2
    found = capsys.readouterr().err.strip().splitlines()
    assert found[-1].startswith("error: ")
    return found[-1]


def test_wrong_inputs_are_one_sentence_each(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_objective.py").write_text(MINE)
    path = str(run)
    assert "There is no run in 'nowhere'" in error_of(capsys, "nowhere")
    gone = error_of(capsys, path, "--step", "9")
    weights = "can't be inspected: steps 1, 3, 4 can be computed again from weights"
    assert f"{weights}, and completions of step 2 were logged" in gone
    assert "did you mean 'grpo'" in error_of(capsys, path, "--objective", "gropo")
    assert "--objective" in error_of(capsys, path, "--objective", "")
    without = error_of(capsys, path, "--objective", "grpo reference_kl_coef=0.1")
    assert "the run has no reference policy" in without
    few = error_of(capsys, path, "--fresh-samples", "8")
    assert "ask for 12 or more, or for 0" in few
    broken = error_of(capsys, path, "--objective", "broken_objective.py:Broken")
    assert "The objective 'broken_objective.py:Broken' failed with KeyError" in broken
    assert "has no folder" in error_of(capsys, path, "--page", "no/folder/page.html")
    checkpoint = tmp_path / "copy"
    shutil.copytree(run, checkpoint)
    weights = checkpoint / "checkpoints" / "step-3" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "choose another step with --step" in error_of(capsys, str(checkpoint))


def test_a_cluster_whose_engine_is_elsewhere_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    config = copy / "config.toml"
    text = config.read_text().replace('engine = "native"', 'engine = "vllm"')
    config.write_text(f"{text}\n[cluster]\n")
    assert "not computed again in one process" in error_of(capsys, str(copy), "--step", "1")
    config.write_text(config.read_text().replace('engine = "vllm"', 'engine = "native"'))
    found = examine(copy, step=1, objectives=("grpo",), fresh_samples=0)
    assert math.isfinite(found.own.gradient.norm)  # type: ignore[union-attr]


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
def test_the_page_opens_without_a_complaint(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    words = ["--objective", "grpo", "p3o", "--page", str(file)]
    assert main(["inspect", str(run), "--step", "1", *words]) == 0
    with chromium(tmp_path / "profile") as page:
        page.load(file)
        assert page.complaints == []
        assert page.dialogs == []
        assert page.requests == [file.as_uri()]
        assert HOSTILE in page.evaluate("document.querySelector('h1').textContent")
        headings = page.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)")
        assert headings[:5] == [
            "What it says",
            "Tokens",
            "Mean weight by ratio",
            "Gradients",
            "Cosines of the gradients",
        ]
        assert page.evaluate("document.querySelectorAll('.tokens span').length") > 20
        # nothing is wider than the window but what scrolls by itself
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
