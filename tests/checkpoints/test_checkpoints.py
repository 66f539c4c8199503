"""Checkpoints: whole at any moment, read by any number of ranks, and honest about damage."""

import json
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support import checkpoint_ranks as ranks
from tests.support.small_config import write_config
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trustbatch.checkpoints.load import (
    list_checkpoints,
    newest_checkpoint,
    optimizer_state_of,
    restore,
)
from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.checkpoints.save import Checkpointer
from trustbatch.checkpoints.shards import is_plain
from trustbatch.cli import main
from trustbatch.errors import CheckpointError
from trustbatch.models.tiny import build_tokenizer
from trustbatch.observe.run_folder import read_metrics
from trustbatch.training.optimizer import create_moments

NO_GROUP = 0


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def written(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """For each number of ranks, a folder with a checkpoint after two of four steps."""
    folders = {}
    for num_ranks in (NO_GROUP, 1, 2, 4):
        folder = folders[num_ranks] = tmp_path_factory.mktemp(f"ranks-{num_ranks}")
        ranks.in_ranks(num_ranks, folder, ranks.train_and_save, tiny_folder, folder)
    return folders


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (NO_GROUP, NO_GROUP),
        (NO_GROUP, 2),
        (1, NO_GROUP),
        (1, 2),
        (2, NO_GROUP),
        (2, 1),
        (2, 2),
        (4, 2),
    ],
)
def test_any_number_of_ranks_reads_what_any_number_wrote(
    written: dict[int, Path], tiny_folder: Path, tmp_path: Path, before: int, after: int
) -> None:
    folder = written[before]
    ranks.in_ranks(after, tmp_path, ranks.load_and_go_on, tiny_folder, folder, tmp_path)
    names = [path.name for path in (folder / "checkpoints/step-2/trainer").glob("rank-*")]
    assert {name[: len("rank-00001-of-00004")] for name in names} == {
        f"rank-{rank + 1:05d}-of-{max(before, 1):05d}" for rank in range(max(before, 1))
    }
    stored = load_file(folder / "state-2.safetensors")
    assert any(name.startswith("exp_avg_sq/") for name in stored)
    assert_same(stored, load_file(tmp_path / "state-2.safetensors"))
    if before == after:  # the sums of gradients depend on the number of ranks
        assert_same(
            load_file(folder / "state-4.safetensors"), load_file(tmp_path / "state-4.safetensors")
        )


@pytest.mark.parametrize("num_ranks", [NO_GROUP, 4])
def test_a_checkpoint_is_an_ordinary_hugging_face_folder(
    written: dict[int, Path], num_ranks: int
) -> None:
    folder = written[num_ranks] / "checkpoints" / "step-2"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert AutoTokenizer.from_pretrained(folder).decode([2, 3]) == "01"
    # large models are split into files with an index, and tied weights are written once
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert set(index.values()) == {path.name for path in folder.glob("*.safetensors")}
    assert all(path.stat().st_size < 320_000 for path in folder.rglob("*.safetensors"))
    assert "lm_head.weight" not in index
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state = load_file(written[num_ranks] / "state-2.safetensors")
    parameters = dict(model.named_parameters())
    assert parameters.keys() == index.keys()
    assert all(torch.equal(parameters[name], state[name]) for name in parameters)


@pytest.fixture
def trainer(tiny_folder: Path) -> ranks.Trainer:
    return ranks.make_trainer(tiny_folder)


def save(folder: Path, trainer: ranks.Trainer, *steps: int, keep: int = 2) -> Path:
    checkpointer = Checkpointer(folder, trainer, keep=keep)
    for step in steps:
        ranks.take_step(trainer, step)
        checkpointer.save(LoopState(step=step))
    checkpointer.finish()
    return folder / f"step-{steps[-1]}"


def test_training_goes_on_while_the_state_of_before_is_written(
    trainer: ranks.Trainer, tiny_folder: Path, tmp_path: Path
) -> None:
    checkpointer = Checkpointer(tmp_path, trainer, keep=2)
    ranks.take_step(trainer, 1)
    before = ranks.whole_state(trainer)
    may_write = threading.Event()
    checkpointer._pool.submit(may_write.wait)
    checkpointer.save(LoopState(step=1))
    ranks.take_step(trainer, 2)  # changes weights and moments in place
    assert list_checkpoints(tmp_path) == []
    may_write.set()
    checkpointer.finish()
    again = ranks.make_trainer(tiny_folder)
    assert restore(tmp_path / "step-1", again).step == 1
    assert_same(ranks.whole_state(again), before)


def test_what_is_not_trained_has_no_optimizer_state(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = ranks.make_trainer(tiny_folder, frozen="mlp")
    checkpoint = save(tmp_path, trainer, 1)
    again = ranks.make_trainer(tiny_folder, frozen="mlp")
    restore(checkpoint, again)
    state = ranks.whole_state(again)
    assert_same(state, ranks.whole_state(trainer))
    assert not [name for name in state if "/" in name and "mlp" in name]
    for each in (trainer, again):
        ranks.take_step(each, 2)
    assert_same(ranks.whole_state(again), ranks.whole_state(trainer))


LATE = "model.layers.1.mlp.up_proj.weight"


def test_what_never_had_a_gradient_may_lack_optimizer_state(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """AdamW itself creates it with the first gradient; a run creates all of it before."""
    trainer = ranks.make_trainer(tiny_folder)
    late = trainer.policy.model.get_parameter(LATE).requires_grad_(False)
    checkpoint = save(tmp_path, trainer, 1)
    late.requires_grad_(True)
    stored = ranks.whole_state(trainer)
    again = ranks.make_trainer(tiny_folder)
    create_moments(again.optimizer)
    restore(checkpoint, again)
    state = ranks.whole_state(again)
    added = {f"{key}/{LATE}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert state.keys() - stored.keys() == added
    assert not any(bool(state[name].any()) for name in added)
    assert_same({name: state[name] for name in stored}, stored)
    for each in (trainer, again):
        ranks.take_step(each, 2)
    assert_same(ranks.whole_state(again), ranks.whole_state(trainer))


def test_quantized_optimizer_states_come_back(tiny_folder: Path, tmp_path: Path) -> None:
    optim = pytest.importorskip("torchao.optim")
    first, again = (ranks.make_trainer(tiny_folder) for _ in range(2))
    for trainer in (first, again):
        trainer.optimizer = optim.AdamW8bit(trainer.policy.model.parameters())
    with torch.compiler.set_stance("force_eager"):
        restore(save(tmp_path, first, 1), again)
    states = [optimizer_state_of(trainer) for trainer in (first, again)]
    assert states[0].keys() == states[1].keys()
    assert any(not is_plain(tensor) for tensor in states[0].values())
    for before, after in zip(*(state.values() for state in states), strict=True):
        assert type(before) is type(after)
        # quantized again, so up to the distance of neighboring codes
        largest = float(before.dequantize().abs().max()) if not is_plain(before) else 0.0
        torch.testing.assert_close(
            *(tensor if is_plain(tensor) else tensor.dequantize() for tensor in (before, after)),
            rtol=0.02,
            atol=1e-3 * largest,
        )


def test_the_state_of_another_optimizer_gives_a_sentence(
    trainer: ranks.Trainer, tiny_folder: Path, tmp_path: Path
) -> None:
    checkpoint = save(tmp_path, trainer, 1)
    other = ranks.make_trainer(tiny_folder)
    other.optimizer = torch.optim.Adagrad(other.policy.model.parameters())  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"step-1 can't be read .*of another optimizer"):
        restore(checkpoint, other)


def test_half_of_the_state_of_a_parameter_gives_a_sentence(
    trainer: ranks.Trainer, tiny_folder: Path, tmp_path: Path
) -> None:
    ranks.take_step(trainer, 1)
    del trainer.optimizer.state[trainer.policy.model.get_parameter(LATE)]["exp_avg_sq"]
    checkpointer = Checkpointer(tmp_path, trainer, keep=1)
    checkpointer.save(LoopState(step=1))
    checkpointer.finish()
    with pytest.raises(CheckpointError, match=r"step-1 can't be read .*of another optimizer"):
        restore(tmp_path / "step-1", ranks.make_trainer(tiny_folder))


def test_as_many_as_asked_for_are_kept(trainer: ranks.Trainer, tmp_path: Path) -> None:
    (tmp_path / ".writing-step-1").mkdir()
    (tmp_path / ".deleting-step-0").mkdir()
    save(tmp_path, trainer, 1, 2, 9, 10, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-2", "step-9"]


MOMENTS = (
    ".writing-step-3",
    ".writing-step-3/trainer/rank-*",
    ".writing-step-3/config.json",
    ".writing-step-3/model.safetensors",
    ".writing-step-3/manifest.json",
    "step-3",
    ".deleting-step-2",
)


@pytest.mark.parametrize(
    ("num_ranks", "moment"),
    [
        *((1, moment) for moment in MOMENTS),
        (2, ".writing-step-3/trainer/rank-00001*"),
        (2, ".writing-step-3/trainer/rank-00002*"),
        (2, ".writing-step-3/model.safetensors"),
    ],
)
def test_a_kill_leaves_the_last_good_checkpoint(
    tiny_folder: Path, tmp_path: Path, num_ranks: int, moment: str
) -> None:
    folder = tmp_path / "checkpoints"
    processes = ranks.start_ranks(num_ranks, tmp_path, ranks.save_for_ever, tiny_folder, folder)
    deadline = time.monotonic() + ranks.START_SECONDS
    while not (folder / "step-1").exists() and time.monotonic() < deadline:
        time.sleep(0.002)  # what follows is too short for a pause
    while not any(folder.glob(moment)) and not (folder / "step-4").exists():
        assert all(process.is_alive() for process in processes), "a process failed"
        assert time.monotonic() < deadline, "nothing is written"
    for process in processes:
        process.kill()
        process.join()
    newest = newest_checkpoint(folder)
    assert newest is not None
    step = int(newest.name[len("step-") :])
    assert step >= (2 if num_ranks == 1 else 1)  # rank 1 may be one save ahead of rank 0
    trainer = ranks.make_trainer(tiny_folder)
    assert restore(newest, trainer).step == step
    assert all((parameter == step).all() for parameter in trainer.policy.model.parameters())
    save(folder, trainer, step + 1)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step}", f"step-{step + 1}"]


DAMAGED_FILES = (
    "manifest.json",
    "model.safetensors",
    "config.json",
    "trainer/rank-00001-of-00001-part-00001.safetensors",
    "trainer/state.json",
)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)


def list_nothing(path: Path) -> None:
    path.write_text('{"format": 1, "files": {}}')


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        *(
            (cut, file, "can't be read" if "manifest" in file else "bytes, not")
            for file in DAMAGED_FILES
        ),
        *((change, file, "was changed after") for file in DAMAGED_FILES[1:]),
        (Path.unlink, "trainer/state.json", r"state\.json is missing"),
        (Path.unlink, "manifest.json", "another version wrote it"),
        (list_nothing, "manifest.json", "does not list config.json"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    trainer: ranks.Trainer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage,
    file: str,
    reason: str,
) -> None:
    newest = save(tmp_path, trainer, 1, 2)
    damage(newest / file)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-1"
    said = capsys.readouterr().err
    assert f"Skipped {newest}, which is damaged: " in said
    assert re.search(reason, said)
    # the next save replaces it
    save(tmp_path, trainer, 2)
    assert newest_checkpoint(tmp_path) == newest


def test_without_a_good_checkpoint_a_sentence_says_what_is_wrong(
    trainer: ranks.Trainer, tmp_path: Path
) -> None:
    assert newest_checkpoint(tmp_path) is None
    newest = save(tmp_path, trainer, 1, 2)
    cut(newest / "model.safetensors")
    shutil.rmtree(tmp_path / "step-1" / "trainer")
    with pytest.raises(CheckpointError, match=r"step-2: model\.safetensors has .*; step-1: .*miss"):
        newest_checkpoint(tmp_path)


def test_a_skipped_checkpoint_does_not_outlive_newer_ones(
    trainer: ranks.Trainer, tmp_path: Path
) -> None:
    cut(save(tmp_path, trainer, 2, 8) / "config.json")
    save(tmp_path, trainer, 3)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-2", "step-3"]


def test_a_checkpoint_of_before_gives_a_sentence(trainer: ranks.Trainer, tmp_path: Path) -> None:
    old = tmp_path / "step-5"
    trainer.policy.save(old)
    (old / "trainer_state.json").write_text('{"step": 5}')
    with pytest.raises(CheckpointError, match=r"step-5: it has no manifest\.json, so another ver"):
        newest_checkpoint(tmp_path)


def test_a_checkpoint_of_another_format_gives_a_sentence(
    trainer: ranks.Trainer, tmp_path: Path
) -> None:
    manifest = save(tmp_path, trainer, 1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 7'))
    with pytest.raises(CheckpointError, match="its format is 7, and this version reads 1"):
        newest_checkpoint(tmp_path)


def test_a_checkpoint_of_another_model_gives_a_sentence(
    trainer: ranks.Trainer, tiny_folder: Path, tmp_path: Path
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    checkpoint = save(tmp_path / "checkpoints", trainer, 1)
    with pytest.raises(CheckpointError, match=r"belongs to another model \('tiny', not 'other'\)"):
        restore(checkpoint, ranks.make_trainer(tiny_folder, name="other"))
    config = Qwen3Config.from_pretrained(tiny_folder)
    config.intermediate_size = 64
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "narrow")
    build_tokenizer().save_pretrained(tmp_path / "narrow")
    with pytest.raises(CheckpointError, match=r"down_proj.weight is \[128, 256\] there, and \[128"):
        restore(checkpoint, ranks.make_trainer(tmp_path / "narrow"))


def test_a_full_disk_ends_in_a_sentence_and_keeps_what_was_there(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    process = ranks.start(ranks.save_with_a_full_disk, tiny_folder, folder)
    process.join(ranks.START_SECONDS)
    error = (tmp_path / "error").read_text()
    assert "step-2 could not be written" in error
    assert "File too large" in error
    assert "the last complete one is step-1" in error
    assert [path.name for path in folder.iterdir()] == ["step-1"]
    assert newest_checkpoint(folder) == folder / "step-1"


def test_a_failed_write_does_not_hide_the_error_that_ends_a_run(
    trainer: ranks.Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    checkpointer = Checkpointer(folder, trainer, keep=2)
    folder.write_text("not a folder")
    checkpointer.save(LoopState(step=1))
    checkpointer.close()
    assert "step-1 could not be written" in capsys.readouterr().err
    checkpointer = Checkpointer(folder, trainer, keep=2)
    checkpointer.save(LoopState(step=1))
    with pytest.raises(CheckpointError, match="there is no other"):
        checkpointer.finish()
    checkpointer.finish()  # raised once only


@pytest.mark.parametrize(
    ("how", "on_rank_zero"),
    [("full", "Rank 1: .*could not be written"), ("absent", "rank 1 wrote nothing for 1 seconds")],
)
def test_a_rank_that_fails_is_named(
    tiny_folder: Path, tmp_path: Path, how: str, on_rank_zero: str
) -> None:
    folder = tmp_path / "checkpoints"
    ranks.in_ranks(2, tmp_path, ranks.fail_on_rank_one, tiny_folder, folder, how)
    assert re.search(on_rank_zero, (tmp_path / "error-0").read_text())
    assert (tmp_path / "error-1").exists() == (how == "full")
    assert list_checkpoints(folder) == []


def test_a_long_wait_is_visible(
    trainer: ranks.Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("trustbatch.checkpoints.save.SECONDS_BEFORE_LINE", 0.01)
    checkpointer = Checkpointer(tmp_path, trainer, keep=2)
    may_write = threading.Event()
    checkpointer._pool.submit(may_write.wait)
    checkpointer.save(LoopState(step=1))
    threading.Timer(0.2, may_write.set).start()
    monkeypatch.setattr("trustbatch.checkpoints.save.SECONDS_BETWEEN_LINES", 0.01)
    checkpointer.finish()
    assert "Waiting for checkpoint step-1: writing (0 s)" in capsys.readouterr().err


def test_files_have_the_mode_of_the_umask(tiny_folder: Path, tmp_path: Path) -> None:
    """Others of a group may evaluate a checkpoint; safetensors alone would keep them out."""
    (tmp_path / "plain").touch()
    checkpointer = Checkpointer(tmp_path, ranks.make_trainer(tiny_folder), keep=1)
    checkpointer.save(LoopState(step=1))
    checkpointer.finish()
    files = [path for path in (tmp_path / "step-1").rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) >= 2
    modes = {oct(path.stat().st_mode & 0o777) for path in files}
    assert modes == {oct((tmp_path / "plain").stat().st_mode & 0o777)}


def test_a_run_may_keep_no_checkpoint(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(tmp_path, tiny_folder, steps=2)
    overrides = ["--run.checkpoint_every", "1", "--run.keep_checkpoints"]
    assert main(["train", file, *overrides, "0", "--run.name", "none"]) == 0
    assert "Model" not in capsys.readouterr().out
    assert main(["train", file, *overrides, "1", "--run.name", "one"]) == 0
    assert "Model" in capsys.readouterr().out
    none, one = tmp_path / "runs" / "none", tmp_path / "runs" / "one"
    assert [len(list_checkpoints(run / "checkpoints")) for run in (none, one)] == [0, 1]
    rewards = [[row["reward/mean"] for row in read_metrics(run)] for run in (none, one)]
    assert rewards[0] == rewards[1]
