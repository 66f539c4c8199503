"""run.trackers: real packages in their local modes, read by themselves; and trackers that fail."""

import gzip
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support import forked
from tests.support.killed_runs import comparable
from tests.support.tracker_readers import (
    Steps,
    read_mlflow,
    read_tensorboard,
    read_trackio,
    read_wandb,
    wandb_records,
)

import trustbatch
from trustbatch.api import RunResult
from trustbatch.config import parse_config
from trustbatch.errors import ConfigError
from trustbatch.observe import trackers
from trustbatch.observe.run_folder import ReadOnlyRunFolder, RunFolder, read_metrics
from trustbatch.observe.status import RunState
from trustbatch.observe.trackers import REGISTRY, Trackers, background, base, wandb_tracker
from trustbatch.observe.trackers.base import COLUMNS, Memory, Row, TrackedRun
from trustbatch.observe.trackers.mlflow_tracker import _name

HOSTILE = "<script>alert(1)</script> ![x](http://x.invalid/a.png) \ud800 中\n# no heading"
NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
INSTALLED = [
    name
    for name in NAMES
    if all(importlib.util.find_spec(each) for each in REGISTRY[name].packages)
]


def needs(name: str) -> Any:
    """A parameter that is skipped where a tracker's package is missing."""
    reason = f"the extra {name} is not installed"
    return pytest.param(name, marks=pytest.mark.skipif(name not in INSTALLED, reason=reason))


@pytest.fixture(autouse=True)
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this user's own trackers is read or written."""
    for name in os.environ:
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    if "trackio" in INSTALLED:
        # the variable is read when it is imported
        import trackio.sqlite_storage

        for module in (trackio.utils, trackio.sqlite_storage):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")


def settings(folder: Path, names: Sequence[str], steps: int = 5, **run: Any) -> dict[str, Any]:
    return {
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 3, "max_tokens": 3},
        "training": {"steps": steps, "learning_rate": 1e-2},
        "evaluation": {
            "every": 2,
            "suite": [{"name": "arithmetic"}],
            "prompts": 4,
            "samples": 2,
        },
        "run": {
            "folder": str(folder / "runs"),
            "name": "mine",
            "rollouts_every": 2,
            "checkpoint_every": 2,
            "trackers": list(names),
            **run,
        },
    }


def stored(name: str, run: Path) -> Steps:
    """What a tracker has of each step, under its own names."""
    memories = json.loads((run / "trackers.json").read_text())
    if name == "tensorboard":
        return read_tensorboard(run)[0]
    if name == "wandb":
        return read_wandb(run)[0]
    if name == "mlflow":
        return read_mlflow(run, memories[name]["id"])[0]
    return read_trackio(memories[name]["id"], "mine")[0]


def check_steps(name: str, run: Path, *, times: bool = True) -> None:
    """All metrics of every step are there, once, and are those of metrics.jsonl."""
    found = stored(name, run)
    lines = {line.pop("step"): line for line in read_metrics(run)}
    assert found.keys() == lines.keys()
    for step, line in lines.items():
        rename = _name if name == "mlflow" else str
        # TensorBoard's scalars are float32
        kind = np.float32 if name == "tensorboard" else float
        expected = {
            rename(key): kind(value)
            for key, value in line.items()
            if times or not key.startswith("time/")
        }
        shown = {key: value for key, value in found[step].items() if key in expected}
        np.testing.assert_equal(shown, expected, err_msg=f"{name}, step {step}")


@pytest.mark.slow
def test_each_has_all_metrics_config_completions_and_the_last_evaluation(
    tiny_folder: Path, tmp_path: Path
) -> None:
    result = train_with(tiny_folder, tmp_path, INSTALLED)
    run = result.folder
    for name in INSTALLED:
        check_steps(name, run)
    last = {k: v for k, v in result.metrics[-1].items() if k.startswith("eval/")}
    assert "eval/arithmetic/pass@1" in last
    (file,) = (run / "rollouts").glob("step-000005.jsonl*")
    content = file.read_bytes()
    text = gzip.decompress(content) if file.suffix == ".gz" else content
    rows = [json.loads(line) for line in text.splitlines()]
    texts = [(row["prompt"], row["completion"], row["reward"]) for row in rows]
    where = [COLUMNS.index(each) for each in ("prompt", "completion", "reward")]
    steps_logged = {1, 2, 4, 5}
    memories = json.loads((run / "trackers.json").read_text())

    _, shown = read_tensorboard(run)
    (config,) = shown["config"].values()
    assert b'    name = "mine"' in config[0]
    assert shown["completions"].keys() == steps_logged
    for text, (prompt, _, _) in zip(shown["completions"][5], texts, strict=True):
        assert f"    prompt: {prompt}\n".encode() in text
    assert json.loads(shown["evaluation"][5][0]) == last
    if "wandb" in INSTALLED:
        _, found = read_wandb(run)
        assert (found["ids"], found["names"]) == ({memories["wandb"]["id"]}, {"mine"})
        assert found["config"]["training"]["steps"] == 5
        assert {k: found["summary"][k] for k in last} == last
        tables = {table["data"][0][0]: table for table in found["tables"]}
        assert tables.keys() == steps_logged
        assert [tuple(row[i] for i in where) for row in tables[5]["data"]] == texts
    if "mlflow" in INSTALLED:
        _, found = read_mlflow(run, memories["mlflow"]["id"])
        assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
        assert found.data.params["training.learning_rate"] == "0.01"
        artifacts = Path(found.info.artifact_uri.removeprefix("file://"))
        assert (artifacts / "config.toml").read_text() == (run / "config.toml").read_text()
        assert json.loads((artifacts / "evaluation.json").read_text()) == last
        table = json.loads((artifacts / "completions" / "step-000005.json").read_text())
        assert [tuple(row[i] for i in where) for row in table["data"]] == texts
        assert len(list((artifacts / "completions").iterdir())) == len(steps_logged)
    if "trackio" in INSTALLED:
        _, tables, config = read_trackio(memories["trackio"]["id"], "mine")
        assert (config["training"]["steps"], config["state"]) == (5, "finished")
        assert config["last_evaluation"] == last
        assert {table["_value"][0]["step"] for table in tables} == steps_logged
        assert [
            (row["prompt"], row["completion"], row["reward"]) for row in tables[-1]["_value"]
        ] == texts


def train_and_kill(model: Path, folder: Path) -> None:
    """Train seven steps, and die when all trackers have them; runs in a process of its own."""
    write = RunFolder.write_metrics

    def write_and_die(self: RunFolder, step: int, metrics: Mapping[str, float]) -> None:
        write(self, step, metrics)
        if step < 7:
            return
        file, waiting = self.path / "trackers.json", {*INSTALLED} - {"tensorboard"}
        while waiting:
            time.sleep(0.1)
            known = json.loads(file.read_text()) if file.exists() else {}
            waiting -= {name for name, memory in known.items() if memory["last_step"] == 7}
        time.sleep(1.0)  # wandb writes to its file ten times a second
        os.kill(os.getpid(), signal.SIGKILL)

    RunFolder.write_metrics = write_and_die
    train_with(model, folder, INSTALLED, steps=9, checkpoint_every=5)


def train_with(model: Path, folder: Path, names: Sequence[str], **changes: Any) -> RunResult:
    return trustbatch.train(model=model, task="arithmetic", **settings(folder, names, **changes))


@pytest.mark.slow
def test_a_killed_run_goes_on_in_each_and_no_step_comes_twice(
    tiny_folder: Path, tmp_path: Path
) -> None:
    with forked.process(train_and_kill, tiny_folder, tmp_path) as process:
        process.wait(300)
        assert process.returncode == -signal.SIGKILL, process.written("stderr")
    run = tmp_path / "runs" / "mine"
    before = json.loads((run / "trackers.json").read_text())
    result = train_with(tiny_folder, tmp_path, INSTALLED, steps=9, checkpoint_every=5)
    assert [line["step"] for line in result.metrics] == [*range(10)]
    after = json.loads((run / "trackers.json").read_text())
    assert {name: memory["id"] for name, memory in after.items()} == {
        name: memory["id"] for name, memory in before.items()
    }
    for name in INSTALLED:
        # steps 6 and 7 were trained twice: all but TensorBoard keep the first, with its times
        check_steps(name, run, times=name == "tensorboard")
    if "wandb" in INSTALLED:
        assert len(list((run / "wandb").glob("offline-run-*"))) == 2


@pytest.mark.slow
def test_a_tracker_that_is_added_gets_all_steps(tiny_folder: Path, tmp_path: Path) -> None:
    train_with(tiny_folder, tmp_path, (), steps=3)
    assert not (tmp_path / "runs" / "mine" / "tensorboard").exists()
    result = train_with(tiny_folder, tmp_path, INSTALLED, steps=4)
    for name in INSTALLED:
        check_steps(name, result.folder)
    # nothing is left to train, and nothing is sent again but the last evaluation
    train_with(tiny_folder, tmp_path, INSTALLED, steps=4)
    for name in INSTALLED:
        check_steps(name, result.folder)
    if "wandb" in INSTALLED:
        newest = max((result.folder / "wandb").glob("offline-run-*/*.wandb"))
        keys = {item.key for record in wandb_records(newest) for item in record.summary.update}
        assert "eval/arithmetic/pass@1" in keys


class Recorded:
    """A tracker that remembers its calls, and does as it is told at one of them."""

    packages: ClassVar[tuple[str, ...]] = ()
    takes_id: ClassVar[bool] = False
    calls: ClassVar[list[tuple[str, Any]]] = []
    rows: ClassVar[list[Row]] = []
    trouble: ClassVar[tuple[str, Callable[[], Any]]] = ("", lambda: None)

    def _called(self, name: str, argument: Any = None) -> None:
        self.calls.append((name, argument))
        if self.trouble[0] == name:
            self.trouble[1]()

    def start(self, run: TrackedRun, memory: Memory) -> None:
        self._called("start")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._called("log", step)

    def log_completions(self, step: int, rows: Sequence[Row]) -> None:
        self.rows.extend(rows)
        self._called("log_completions", step)

    def finish(self, state: RunState, evaluation: Mapping[str, float]) -> None:
        self._called("finish", state)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    """Stands in the place of Trackio."""
    monkeypatch.setitem(REGISTRY, "trackio", Recorded)
    monkeypatch.setattr(Recorded, "calls", [])
    monkeypatch.setattr(Recorded, "rows", [])
    return Recorded


def fail(error: BaseException) -> Callable[[], None]:
    def failing() -> None:
        raise error

    return failing


@pytest.mark.parametrize(
    ("call", "trouble", "words"),
    [
        ("start", fail(OSError("no server at https://me:secret@host/x")), "no server at https://h"),
        ("log", fail(ValueError("\x1b[2J broken\nmore")), "(ValueError: ␛[2J broken)"),
        ("log_completions", fail(SystemExit(3)), "(SystemExit: 3)"),
        ("finish", fail(KeyError()), "(KeyError)"),
        ("log", threading.Event().wait, "(it has not taken everything in time)"),
    ],
    ids=["start", "log", "completions", "finish", "hang"],
)
def test_a_tracker_that_fails_changes_nothing(
    tiny_folder: Path,
    tmp_path: Path,
    recorded: type[Recorded],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    call: str,
    trouble: Callable[[], Any],
    words: str,
) -> None:
    monkeypatch.setattr(recorded, "trouble", (call, trouble))
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 1.0)
    alone = train_with(tiny_folder, tmp_path / "alone", (), steps=3)
    assert "left out" not in capsys.readouterr().err
    beside = train_with(tiny_folder, tmp_path / "beside", ("trackio", "tensorboard"), steps=3)
    said = capsys.readouterr().err
    assert said.count("The tracker trackio is left out from now on") == 1
    assert words in said
    assert "secret" not in said
    assert "\x1b" not in said
    assert sum(each == call for each, _ in recorded.calls) == 1
    assert comparable(alone.folder) == comparable(beside.folder)
    weights = [load_file(each.checkpoint / "model.safetensors") for each in (alone, beside)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    steps, _ = read_tensorboard(beside.folder)
    assert steps.keys() == {0, 1, 2, 3}  # the others go on


def tracked(folder: Path, **changes: Any) -> TrackedRun:
    words = {"name": "mine", "folder": folder, "toml": "", "config": {}, "step": 0}
    return TrackedRun(**{**words, **changes})


def test_a_tracker_that_hangs_delays_no_step(
    tmp_path: Path,
    recorded: type[Recorded],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recorded, "trouble", ("start", threading.Event().wait))
    monkeypatch.setattr(background, "MAX_CALLS", 10)
    running = Trackers(("trackio",), tracked(tmp_path), [])
    began = time.monotonic()
    for step in range(1, 100):
        running.log(step, {"a": 1.0})
    running.finish("finished")
    assert time.monotonic() - began < 5.0
    assert capsys.readouterr().err.count("it is 10 calls behind") == 1


def test_calls_come_in_order_with_bounded_plain_text(
    tmp_path: Path, recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MAX_ROWS", 2)
    monkeypatch.setattr(base, "MAX_CHARACTERS", 90)
    running = Trackers(("trackio",), tracked(tmp_path), [{"step": 1, "a": 2.0}])
    record = {"step": 2, "completion": HOSTILE, "prompt": "p" * 1090, "reward": None}
    running.log_completions(2, [record] * 3)
    running.log(2, {"a": 1.0})
    running.finish("stopped")
    calls = [("start", None), ("log", 1), ("log_completions", 2), ("log", 2)]
    assert recorded.calls == [*calls, ("finish", "stopped")]
    assert len(recorded.rows) == 2
    row = dict(zip(COLUMNS, recorded.rows[0], strict=True))
    assert row["completion"] == HOSTILE.replace("\ud800", "?")
    assert row["prompt"] == "p" * 90 + " [1,000 characters more]"
    assert (row["step"], row["reward"], row["answer"]) == (2, None, None)


def test_tensorboard_shows_a_model_s_text_as_it_is(tmp_path: Path) -> None:
    from tensorboard.plugins.text.text_plugin import text_array_to_html

    running = Trackers(("tensorboard",), tracked(tmp_path), [])
    running.log_completions(1, [{"completion": HOSTILE}])
    running.log(1, {"a": 1.0})
    running.finish("finished")
    _, shown = read_tensorboard(tmp_path)
    page = text_array_to_html(np.array(shown["completions"][1], dtype=object), True)
    assert "&lt;script&gt;alert(1)&lt;/script&gt; ![x](http://x.invalid/a.png) ? 中" in page
    assert "# no heading" in page
    assert not {"<script", "<img", "<h1"} & {*re.findall(r"<\w+", page)}


def test_an_id_is_remembered_before_it_is_used(
    tmp_path: Path, recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run which is killed at its start leaves no other run behind."""
    monkeypatch.setattr(recorded, "takes_id", True)
    found: list[dict[str, Any]] = []
    file = tmp_path / "trackers.json"
    monkeypatch.setattr(
        recorded, "trouble", ("start", lambda: found.append(json.loads(file.read_text())))
    )
    for _ in range(2):
        Trackers(("trackio",), tracked(tmp_path), []).finish("finished")
    assert found[0] == found[1]
    assert len(found[0]["trackio"]["id"]) == 32


def test_a_broken_memory_is_said_and_begins_anew(
    tmp_path: Path, recorded: type[Recorded], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trackers.json").write_text("{")
    Trackers(("trackio",), tracked(tmp_path), []).finish("finished")
    assert "trackers.json can't be read: trackers get a new run each." in capsys.readouterr().err


def test_other_ranks_open_no_tracker(tiny_folder: Path, tmp_path: Path) -> None:
    config = parse_config(
        {"model": {"name": str(tiny_folder)}, "task": {"name": "arithmetic"}}
        | settings(tmp_path, NAMES)
    )
    before = threading.enumerate()
    folder = ReadOnlyRunFolder(config.run, config.to_toml())
    folder.start(0)
    folder.write_metrics(1, {"a": 1.0})
    folder.close()
    assert threading.enumerate() == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_missing_package_is_a_sentence_at_the_start(
    name: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    package = REGISTRY[name].packages[0]
    with pytest.raises(ConfigError) as caught:
        train_with(tiny_folder, tmp_path, (name,))
    assert str(caught.value) == (
        f"run.trackers has {name!r}, which needs the package {package}: "
        f"pip install 'trustbatch[{name}]', or leave it out."
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["wandb", "mlflow", "wandb"], "'wandb' is there twice: name each tracker once."),
        (["tensorbored"], "run.trackers"),
    ],
)
def test_words_that_are_refused(tmp_path: Path, names: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train_with(tmp_path, tmp_path, names)
    assert words in str(caught.value)


def train_without_answer(model: Path, folder: Path, name: str) -> None:
    """Runs in a process of its own, which must end although nobody answers."""
    trackers.FINISH_SECONDS = 1.0
    wandb_tracker.CONNECT_SECONDS = 5.0  # at its exit, wandb waits for its connection
    train_with(model, folder, (name,), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [needs("wandb"), needs("mlflow")])
def test_a_server_that_never_answers_holds_nothing_up(
    name: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with forked.process(train_without_answer, tiny_folder, tmp_path, name) as process:
            _, errors = process.communicate(timeout=40)
            assert process.returncode == 0, errors
    assert errors.count(f"The tracker {name} is left out from now on") == 1
    assert len(read_metrics(tmp_path / "runs" / "mine")) == 3


@pytest.mark.slow
def test_nothing_is_imported_that_is_not_asked_for() -> None:
    script = (
        "import sys, trustbatch.api, trustbatch.observe.trackers; "
        "assert not {'wandb', 'mlflow', 'trackio'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.skipif("wandb" not in INSTALLED, reason="the extra wandb is not installed")
def test_wandb_online_without_a_login_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    Trackers(("wandb",), tracked(tmp_path), []).finish("finished")
    assert "WANDB_MODE is online and there is no login: run wandb login" in capsys.readouterr().err
