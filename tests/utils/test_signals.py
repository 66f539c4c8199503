"""Ctrl-C and SIGTERM: the step is finished and saved; a second one ends the run at once."""

import json
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.support import forked

from trustbatch.cli import main
from trustbatch.config import parse_config
from trustbatch.observe.run_folder import read_metrics
from trustbatch.training.trainer import Trainer
from trustbatch.utils.signals import SIGNALS, StopSignals

STEPS = 200
CLUSTER = {"engines": 1, "reward_workers": 0}
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def config_file(model: Path, folder: Path, **tables: Any) -> Path:
    tree = {
        "model": {"name": str(model), "device": "cpu"},
        "task": {"name": "arithmetic"},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 3},
        "training": {"steps": STEPS, "schedule": "constant", "warmup_fraction": 0.0},
        "run": {"folder": str(folder), "checkpoint_every": 1000},
        **tables,
    }
    file = folder / "config.toml"
    file.write_text(parse_config(tree).to_toml())
    return file


def wait_for_step(run: Path, step: int, process: forked.Forked) -> None:
    deadline = time.monotonic() + 120
    while len(read_metrics(run)) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} is not reached"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "cluster"),
    [
        (signal.SIGINT, None),
        (signal.SIGTERM, None),
        pytest.param(signal.SIGTERM, CLUSTER, marks=needs_ray),
    ],
)
def test_the_step_is_finished_and_saved(
    tiny_folder: Path, tmp_path: Path, number: int, cluster: dict[str, int] | None
) -> None:
    run = tmp_path / "run"
    file = config_file(tiny_folder, tmp_path, **{"cluster": cluster} if cluster else {})
    with forked.command("train", file) as process:
        wait_for_step(run, 2, process)
        process.send_signal(number)
        printed, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors
    assert "Stopping after this step; press Ctrl-C again" in errors
    step = read_metrics(run)[-1]["step"]
    assert 2 <= step < STEPS
    assert f"Stopped after step {step}: the same command continues the run." in printed
    assert (run / "checkpoints" / f"step-{step}").is_dir()
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with forked.process(slow_train, str(config_file(tiny_folder, tmp_path))) as process:
        wait_for_step(run, 2, process)
        wait_for_words("in the third step", process)
        process.send_signal(signal.SIGINT)
        wait_for_words("Stopping after this step", process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "The same command continues from the last checkpoint, if there is one." in errors
    assert not list((run / "checkpoints").glob("step-*"))


def wait_for_words(words: str, process: forked.Forked) -> None:
    deadline = time.monotonic() + 120
    while words not in process.written("stderr"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{words!r} is not said"
        time.sleep(0.01)


def slow_train(file: str) -> int:
    """Train in a process whose third step takes a minute."""
    train, count = Trainer.train, iter(range(100))

    def slow(*args: Any, **kwargs: Any) -> Any:
        if next(count) > 1:
            sys.stderr.write("in the third step\n")
            sys.stderr.flush()
            time.sleep(60)
        return train(*args, **kwargs)

    Trainer.train = slow
    return main(["train", file])


def test_a_run_that_keeps_no_checkpoint_ends_after_its_step_and_starts_over(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keeps_none = {"folder": str(tmp_path), "keep_checkpoints": 0}
    file = str(config_file(tiny_folder, tmp_path, run=keeps_none))
    train, count = Trainer.train, iter(range(100))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(count) % 3 == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train(*args, **kwargs)

    monkeypatch.setattr(Trainer, "train", interrupted)
    run = tmp_path / "run"
    for _ in range(2):
        assert main(["train", file]) == 128 + signal.SIGTERM
        assert "Stopped after step 3: the same command starts over." in capsys.readouterr().out
        assert [line["step"] for line in read_metrics(run)] == [1, 2, 3]
        assert json.loads((run / "status.json").read_text())["state"] == "stopped"
        assert not list((run / "checkpoints").glob("step-*"))


def test_a_signal_before_the_first_step_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals() as signals:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
    with StopSignals() as signals:
        assert not signals.is_asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.is_asked()
    assert "Stopping after this step" in capfd.readouterr().err
    assert [signal.getsignal(number) for number in SIGNALS] == before
