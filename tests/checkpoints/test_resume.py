"""A run killed with SIGKILL at any moment and started again equals one that was never killed."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import forked
from tests.support.killed_runs import LEARNING, Kind, comparable, finish
from tests.support.rollout_files import read_rollouts, rollout_file

import trustbatch
from trustbatch.cli import main
from trustbatch.errors import CheckpointError, ConfigError
from trustbatch.observe.run_folder import read_metrics


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "step-12" / "model.safetensors")


def kill_after_steps(config: Path, run: Path, steps: tuple[int, ...]) -> None:
    """Start a run, kill it after each of the steps, and let it end."""
    for step in steps:
        with forked.command("train", config, folder=config.parent) as process:
            deadline = time.monotonic() + 120
            while len(read_metrics(run)) < step and process.poll() is None:
                assert time.monotonic() < deadline, "the run makes no progress"
                time.sleep(0.002)
            process.kill()
            process.wait()
            assert len(read_metrics(run)) < 12, "the run ended before it could be killed"
    finish(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kill_after"),
    [
        (Kind(lag=3), (2, 7)),
        (Kind(objective="two_anchor", every=5), (1, 6, 11)),
        (Kind(task=LEARNING, lag=1, every=3), (4, 8)),
    ],
    ids=["lag", "two anchors", "curriculum and dynamic sampling"],
)
def test_a_killed_run_continues_bit_for_bit(
    tmp_path: Path,
    tiny_folder: Path,
    kind: Kind,
    kill_after: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole run is trained here: two processes have other orders of sets, too."""
    runs = {}
    for name in ("whole", "killed"):
        config = kind.write(tmp_path / name, tiny_folder)
        runs[name] = run = config.parent / "runs" / "run"
        if name == "whole":
            monkeypatch.chdir(config.parent)
            assert main(["train", str(config)]) == 0
        else:
            kill_after_steps(config, run, kill_after)
    assert comparable(runs["killed"]) == comparable(runs["whole"])
    assert [line["step"] for line in comparable(runs["killed"])] == list(range(1, 13))
    whole, killed = final_weights(runs["whole"]), final_weights(runs["killed"])
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    kept = sorted(path.name for path in (runs["killed"] / "checkpoints").iterdir())
    assert len([name for name in kept if name.startswith("step-")]) == 2
    for step in ("step-000001.jsonl.gz", "step-000012.jsonl.gz"):
        both = [(runs[name] / "rollouts" / step).read_bytes() for name in ("whole", "killed")]
        assert both[0] == both[1]


def small_run(tiny_folder: Path, folder: Path, **changes: Any) -> trustbatch.RunResult:
    tables: dict[str, Any] = {
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 3, "lag": 1},
        "training": {"steps": 4, "learning_rate": 1e-3},
        "run": {"name": "run", "folder": str(folder), "checkpoint_every": 2},
    }
    for key, value in changes.items():
        tables[key] = {**tables[key], **value} if key in tables else value
    return trustbatch.train(model=tiny_folder, task={"name": "arithmetic", "level": 1}, **tables)


def test_a_finished_run_is_not_trained_again(tiny_folder: Path, tmp_path: Path) -> None:
    first = small_run(tiny_folder, tmp_path)
    again = small_run(tiny_folder, tmp_path)
    assert first.metrics == again.metrics
    assert len(again.metrics) == 4


@pytest.mark.parametrize("lag", [0, 1])
def test_more_steps_extend_a_run(tiny_folder: Path, tmp_path: Path, lag: int) -> None:
    constant = {"schedule": "constant", "warmup_fraction": 0.0}
    settings: dict[str, Any] = {"rollout": {"lag": lag}, "training": constant}
    small_run(tiny_folder, tmp_path / "extended", **settings)
    settings["training"] = {**constant, "steps": 7}
    extended = small_run(tiny_folder, tmp_path / "extended", **settings)
    assert [line["step"] for line in extended.metrics] == [1, 2, 3, 4, 5, 6, 7]
    whole = small_run(tiny_folder, tmp_path / "whole", **settings)
    # with a lag the queue of batches has run empty at the old end, and fills again
    same = 7 if lag == 0 else 4
    assert comparable(extended.folder)[:same] == comparable(whole.folder)[:same]
    settings["training"] = {**constant, "steps": 5}
    with pytest.raises(ConfigError, match=r"training.steps was 7, now 5"):
        small_run(tiny_folder, tmp_path / "extended", **settings)


def test_a_removed_configuration_does_not_let_another_one_continue(
    tiny_folder: Path, tmp_path: Path
) -> None:
    run = small_run(tiny_folder, tmp_path).folder
    (run / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"training.learning_rate was 0.001, now 0.01"):
        small_run(tiny_folder, tmp_path, training={"learning_rate": 0.01})
    assert len(small_run(tiny_folder, tmp_path).metrics) == 4
    assert (run / "config.toml").is_file()


def test_another_configuration_in_the_same_folder_is_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    small_run(tiny_folder, tmp_path)
    with pytest.raises(ConfigError, match=r"training.learning_rate was 0.001, now 0.01"):
        small_run(tiny_folder, tmp_path, training={"learning_rate": 0.01})
    # where results go and how work is divided may change
    changes = {"run": {"checkpoint_every": 3}, "training": {"micro_batch_tokens": 64}}
    assert len(small_run(tiny_folder, tmp_path, **changes).metrics) == 4
    # a key that the stored configuration does not know yet counts as its default
    stored = tmp_path / "run" / "config.toml"
    stored.write_text(stored.read_text().replace("weight_decay = 0.01\n", ""))
    assert len(small_run(tiny_folder, tmp_path).metrics) == 4


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = small_run(tiny_folder, tmp_path)
    weights = load_file(result.checkpoint / "model.safetensors")
    damaged = result.checkpoint / "trainer" / "state.json"
    damaged.write_bytes(damaged.read_bytes()[:20])
    again = small_run(tiny_folder, tmp_path)
    assert "step-4, which is damaged: trainer/state.json has 20 bytes" in capsys.readouterr().err
    before, after = ([line["policy/loss"] for line in r.metrics] for r in (result, again))
    assert before == after
    retrained = load_file(again.checkpoint / "model.safetensors")
    assert all(torch.equal(weights[name], retrained[name]) for name in weights)


def test_a_checkpoint_of_another_run_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    result = small_run(tiny_folder, tmp_path)
    other = tmp_path / "other-model"
    shutil.copytree(tiny_folder, other)
    shutil.copytree(result.folder / "checkpoints", tmp_path / "other" / "checkpoints")
    with pytest.raises(ConfigError, match=r"model.name was .*tiny, now .*other-model"):
        small_run(other, tmp_path, run={"name": "other"})


def test_a_checkpoint_put_into_the_folder_of_another_run_is_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    mine = small_run(tiny_folder, tmp_path / "mine")
    other = small_run(tiny_folder, tmp_path / "other", seed=1)
    shutil.rmtree(mine.checkpoint)
    shutil.copytree(other.checkpoint, mine.checkpoint)
    with pytest.raises(
        ConfigError, match=r"step-4 belongs to .* configuration \(seed was 1, now 0"
    ):
        small_run(tiny_folder, tmp_path / "mine")


def test_a_run_that_can_not_save_ends_with_a_sentence(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"step-2 could not be written .*there is no other"):
        small_run(tiny_folder, tmp_path)


def test_a_checkpoint_cut_short_while_writing_is_ignored(tiny_folder: Path, tmp_path: Path) -> None:
    result = small_run(tiny_folder, tmp_path)
    checkpoints = result.folder / "checkpoints"
    (checkpoints / "step-4").rename(checkpoints / ".writing-step-4")
    (checkpoints / ".deleting-step-1").mkdir()
    with (result.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    again = small_run(tiny_folder, tmp_path)
    assert [line["step"] for line in again.metrics] == [1, 2, 3, 4]
    before, after = ([line["policy/loss"] for line in r.metrics] for r in (result, again))
    assert before == after
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-4"]


def test_the_run_folder_holds_what_it_promises(tiny_folder: Path, tmp_path: Path) -> None:
    result = small_run(tiny_folder, tmp_path)
    environment = json.loads((result.folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert (result.folder / "config.toml").is_file()
    assert list((result.folder / "tensorboard").glob("events*"))
    rows = read_rollouts(rollout_file(result.folder, 4))
    assert len(rows) == 4
    # batch 4 was sampled one version earlier than the version 3 that trained on it
    assert {row["version"] for row in rows} == {2}
    assert all(row["engine"] == "native" and row["policy"] == str(tiny_folder) for row in rows)
    assert [line["rollout/lag_mean"] for line in result.metrics] == [0.0, 1.0, 1.0, 1.0]


def test_the_trained_model_is_an_ordinary_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = small_run(tiny_folder, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)
    assert model.config.model_type == "qwen3"
    assert tokenizer.decode(tokenizer.encode("12+34=")) == "12+34="
