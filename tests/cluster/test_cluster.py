"""Runs on real Ray: generation beside training, which is the synchronous run bit for bit."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import forked
from tests.support.processes import LOOPBACK, actors, descendants, kill_meanwhile, listening
from tests.support.rollout_files import rollout_text
from tests.tasks.test_named_tasks import rows_file

import trustbatch
from trustbatch.api import train_config
from trustbatch.cli import main
from trustbatch.cluster.ray_runtime import joined_ray
from trustbatch.config import parse_config
from trustbatch.errors import CanaryError, ConfigError, DeadEngineError, EngineError
from trustbatch.models.policy import Policy
from trustbatch.observe.run_folder import read_metrics
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.tasks import build_task
from trustbatch.training.canary import CanaryRecorder
from trustbatch.types import Prompt

if find_spec("ray") is None:  # not imported here: a run does that, with its own settings
    pytest.skip("Ray is not installed", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As processes on a busy machine have it; engines take the number over."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def ray_at_hand(one_thread: None) -> Iterator[None]:
    """One Ray for all tests, with room for the largest of them."""
    largest = {"engines": 3, "trainers": 2, "reward_workers": 2}
    tree = {"model": {"name": "any"}, "task": {"name": "arithmetic"}, "cluster": largest}
    with joined_ray(parse_config(tree)):
        yield


def run(
    tiny_folder: Path,
    folder: Path,
    *,
    is_asked_to_stop: Callable[[], bool] | None = None,
    **changes: Any,
) -> trustbatch.RunResult:
    tables: dict[str, Any] = {
        "model": {"name": str(tiny_folder)},
        "task": {"name": "arithmetic", "level": 1},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_tokens": 4,
            "temperature": 1.1,
            "prompts_per_call": 2,
        },
        "training": {"steps": 6, "learning_rate": 1e-3},
        "run": {"folder": str(folder), "checkpoint_every": 3, "rollouts_every": 1},
    }
    for key, value in changes.items():
        tables[key] = {**tables[key], **value} if key in tables else value
    return train_config(parse_config(tables), is_asked_to_stop=is_asked_to_stop)


def comparable(result: trustbatch.RunResult) -> list[dict[str, Any]]:
    """All metrics but those that measure the clock, the cluster or its canary, and the ledger.

    A cluster can't tell what the engine and what the lag has done, where the version is gone.
    """
    left_out = ("time/", "cluster/", "canary/", "ledger/")
    return [
        {key: value for key, value in line.items() if not key.startswith(left_out)}
        for line in result.metrics
    ]


def rollouts(result: trustbatch.RunResult) -> dict[str, str]:
    return {path.name: rollout_text(path) for path in (result.folder / "rollouts").iterdir()}


EVALUATION = {"every": 2, "suite": ["arithmetic"], "prompts": 5, "samples": 3, "max_tokens": 6}
EVALUATED = "eval/arithmetic/mean_tokens"


def evaluated(result: trustbatch.RunResult) -> dict[str, str]:
    """The samples of all evaluations."""
    folder = result.folder / "evaluations"
    return {path.parent.name: path.read_text() for path in folder.glob("*/samples.jsonl")}


def weights(result: trustbatch.RunResult) -> dict[str, bytes]:
    tensors = load_file(result.checkpoint / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def assert_same(actual: trustbatch.RunResult, expected: trustbatch.RunResult) -> None:
    assert comparable(actual) == comparable(expected)
    assert rollouts(actual) == rollouts(expected)
    assert weights(actual) == weights(expected)


@pytest.mark.parametrize(
    ("lag", "cluster"),
    [
        pytest.param(0, {"engines": 1, "reward_workers": 1}, id="lag 0", marks=pytest.mark.long),
        pytest.param(1, {"engines": 2, "reward_workers": 2}, id="lag 1", marks=pytest.mark.slow),
        pytest.param(1, {"engines": 3}, id="lag 1, 3 engines", marks=pytest.mark.long),
    ],
)
def test_any_number_of_engines_trains_as_one_process_does(
    lag: int, cluster: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    expected = run(tiny_folder, tmp_path / "sync", rollout={"lag": lag})
    actual = run(tiny_folder, tmp_path / "async", cluster=cluster | {"max_lag": lag})
    assert_same(actual, expected)
    # with lag L, the first L batches come from version 0 and the others are L versions old
    assert [line["rollout/lag_max"] for line in actual.metrics] == [min(s, lag) for s in range(6)]
    assert all(line["cluster/engine_restarts"] == 0 for line in actual.metrics)
    assert not (actual.folder / "weights").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["shared_memory", pytest.param("disk", marks=pytest.mark.long)])
def test_engines_of_a_cluster_get_adapters_alone(
    tiny_folder: Path, tmp_path: Path, method: str
) -> None:
    """They have the frozen weights already."""
    pytest.importorskip("peft")
    lora = {"lora": {"rank": 4}, "name": str(tiny_folder)}
    expected = run(tiny_folder, tmp_path / "sync", model=lora, rollout={"lag": 1})
    cluster = {"engines": 2, "max_lag": 1, "weight_transfer": method}
    actual = run(tiny_folder, tmp_path / "async", model=lora, cluster=cluster)
    assert_same(actual, expected)


@pytest.mark.long
def test_batches_are_reused_and_dynamic_sampling_keeps_the_bound(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """With reuse, what differs from the synchronous run is which version sampled which batch."""
    dynamic = {"dynamic_sampling": True, "max_sampling_rounds": 2}
    expected = run(tiny_folder, tmp_path / "sync", rollout=dynamic | {"lag": 0})
    actual = run(tiny_folder, tmp_path / "async", rollout=dynamic, cluster={"max_lag": 1})
    assert_same(actual, expected)

    reused = run(tiny_folder, tmp_path / "reused", cluster={"max_lag": 2, "reuse": 2})
    assert [line["rollout/lag_max"] for line in reused.metrics] == [0, 1, 1, 2, 1, 2]
    # what was sampled is the same; what the policy thinks of it is not
    samples = [
        [(line["prompt_id"], line["token_id"]) for line in map(json.loads, text.splitlines())]
        for _, text in _numbered(rollouts(reused))
    ]
    assert samples[0] == samples[1] != samples[2] == samples[3] != samples[4] == samples[5]


@pytest.mark.long
def test_an_evaluation_is_that_of_one_process_and_changes_nothing(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Second policies only sample for training, and older versions continue meanwhile.

    Lag 2 and weights by disk.
    """
    second = {"model": str(tiny_folder), "name": "second", "share": 0.5, "temperature": 1.5}
    settings = {"training": {"steps": 4, "learning_rate": 1e-3}}
    mixture = {"policies": [second]}
    plain = run(tiny_folder, tmp_path / "plain", rollout={"lag": 2, **mixture}, **settings)
    settings["evaluation"] = EVALUATION
    expected = run(tiny_folder, tmp_path / "sync", rollout={"lag": 2, **mixture}, **settings)
    cluster = {"engines": 2, "reward_workers": 0, "max_lag": 2, "weight_transfer": "disk"}
    actual = run(tiny_folder, tmp_path / "async", rollout=mixture, cluster=cluster, **settings)
    assert_same(actual, expected)
    assert [line["rollout/lag_max"] for line in actual.metrics if line["step"]] == [0, 1, 2, 2]
    assert not (actual.folder / "weights").exists()
    assert evaluated(actual) == evaluated(expected)
    assert len(evaluated(actual)) == 3
    assert [line["step"] for line in actual.metrics if EVALUATED in line] == [0, 2, 4]
    assert len({line[EVALUATED] for line in actual.metrics if EVALUATED in line}) > 1
    trained = [
        {key: value for key, value in line.items() if not key.startswith("eval/")}
        for line in comparable(actual)
    ]
    assert trained[1:] == comparable(plain)
    assert weights(actual) == weights(plain)


def _numbered(files: dict[str, str]) -> list[tuple[int, str]]:
    return [(number, files[name]) for number, name in enumerate(sorted(files), start=1)]


def test_trainers_get_no_task_that_would_leave_its_problems_behind(tmp_path: Path) -> None:
    from trustbatch.cluster.trainers import refuse_unsendable

    rows = rows_file(tmp_path, [{"problem": "1+1", "answer": 2}])
    table = {"name": "file", "path": rows}
    parts = [{"name": "arithmetic"}, table | {"curriculum": {}}]
    refuse_unsendable(build_task("mixture", seed=0, parts=[{"name": "arithmetic"}]))
    for task in (
        build_task(**table, seed=0),
        build_task(**table, seed=0, curriculum={}),
        build_task("mixture", seed=0, parts=parts),
    ):
        with pytest.raises(ConfigError, match="The task 'file' leaves its problems behind"):
            refuse_unsendable(task)

    task: Any = build_task("arithmetic", seed=0)
    object.__setattr__(task, "lock", threading.Lock())
    with pytest.raises(ConfigError, match=r"'arithmetic' can't be sent .* 1\.$"):
        refuse_unsendable(task)


@pytest.mark.long
def test_a_run_that_is_asked_to_stop_goes_on_to_the_same_numbers(
    tiny_folder: Path, tmp_path: Path
) -> None:
    settings = {"training": {"steps": 4, "learning_rate": 1e-3}}
    expected = run(tiny_folder, tmp_path / "sync", rollout={"lag": 1}, **settings)
    settings["cluster"] = {"engines": 1, "reward_workers": 0, "max_lag": 1}
    answers = iter([False, True])
    stopped = run(
        tiny_folder, tmp_path / "async", is_asked_to_stop=lambda: next(answers), **settings
    )
    assert_stopped(stopped, step=2)
    assert_same(run(tiny_folder, tmp_path / "async", **settings), expected)


@pytest.mark.long
def test_an_edited_reward_file_ends_a_resumed_start_of_two_trainers(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "judge.py"
    file.write_text("def long(prompt, completion, answer): return float(len(completion))\n")
    settings: dict[str, Any] = {
        "reward": {"terms": [{"name": "function", "path": f"{file}:long"}]},
        "cluster": {"trainers": 2, "engines": 1, "reward_workers": 0},
    }
    run(tiny_folder, tmp_path, training={"steps": 1}, **settings)
    file.write_text(file.read_text().replace("float", "-1.0 * "))
    with pytest.raises(ConfigError, match=r"judge\.py was edited after step-1 of .* accept the"):
        run(tiny_folder, tmp_path, training={"steps": 2}, **settings)


@pytest.mark.long
def test_more_steps_extend_a_run_whose_older_versions_are_gone(
    tiny_folder: Path, tmp_path: Path
) -> None:
    cluster = {"engines": 1, "reward_workers": 0, "max_lag": 2}
    for steps in (2, 5):
        settings = {"training": {"steps": steps, "learning_rate": 1e-3}, "cluster": cluster}
        result = run(tiny_folder, tmp_path, **settings)
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4, 5]
    assert [line["rollout/lag_max"] for line in result.metrics] == [0, 1, 0, 1, 2]


def assert_stopped(result: trustbatch.RunResult, *, step: int) -> None:
    """See that a run has ended after a step with a checkpoint, though none was due."""
    assert (result.metrics[-1]["step"], result.checkpoint.name) == (step, f"step-{step}")
    assert result.checkpoint.is_dir()
    assert json.loads((result.folder / "status.json").read_text())["state"] == "stopped"


@pytest.mark.long
def test_killed_engines_and_reward_workers_change_nothing(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    length = {"training": {"steps": 12, "learning_rate": 1e-3}}
    expected = run(tiny_folder, tmp_path / "sync", rollout={"lag": 1}, **length)
    plan = [(1, "EngineActor", 1), (2, "RewardActor", 1), (5, "EngineActor", 2)]
    killer = kill_meanwhile(tmp_path / "async" / "run", plan)
    cluster = {"engines": 2, "reward_workers": 1, "max_lag": 1}
    actual = run(tiny_folder, tmp_path / "async", cluster=cluster, **length)
    killer.join()
    assert_same(actual, expected)
    assert actual.metrics[-1]["cluster/engine_restarts"] == 3
    assert actual.metrics[-1]["cluster/reward_restarts"] == 1
    assert "reward worker 0 was replaced" in caplog.text
    status = json.loads((actual.folder / "status.json").read_text())
    assert (status["state"], status["step"], status["restarts"]) == ("finished", 12, 4)
    assert {engine["version"] for engine in status["engines"].values()} <= set(range(12))
    assert status["lag_counts"] == {"0": 16, "1": 11 * 16}


@pytest.mark.slow
def test_a_pool_of_engines_stops_at_a_false_canary_and_at_deaths_without_end(
    tiny_folder: Path, policy: Policy
) -> None:
    from trustbatch.build.engines import open_actor_engines
    from trustbatch.cluster.engine_pool import EnginePool

    tree = {
        "model": {"name": str(tiny_folder), "device": "cpu"},
        "task": {"name": "arithmetic"},
        "cluster": {"engines": 1, "max_restarts": 0},
    }
    engine_pool = EnginePool(parse_config(tree), open_actor_engines)
    prompts = [Prompt(id=text, text=text, answer="") for text in ("1+1=", "12+34=", "7=")]
    recorder = CanaryRecorder(policy, prompts, logprob_mode="processed")
    engine_pool.expect(recorder.record(version=0))
    engine_pool.load_weights(policy.named_weights(), version=0)
    sampled = engine_pool.generate(recorder.requests)
    expected = NativeEngine(policy, seed=0).generate(recorder.requests)
    assert [int(c.token_ids) for c in sampled] == [int(c.token_ids) for c in expected]
    assert 0 < engine_pool.take_canary()["canary/max_abs_logratio"] < 1e-4

    engine_pool.expect(recorder.record(version=1))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    engine_pool.load_weights(policy.named_weights(), version=1)
    with pytest.raises(CanaryError, match=r"version 1\) does not sample from the trainer's policy"):
        engine_pool.generate(recorder.requests)
    assert {c.provenance.version for c in engine_pool.at(0).generate(recorder.requests)} == {0}
    engine_pool.forget_before(7)  # the newest one stays
    with pytest.raises(EngineError, match="Version 0 is not published"):
        engine_pool.at(0).generate(recorder.requests)

    for pid in actors("EngineActor"):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"1 processes in a row .* of engine 0 \(The actor died"):
        engine_pool.generate(recorder.requests)
    engine_pool.close()


def frail_crew(errors: list[Exception], *, max_restarts: int) -> Any:
    """A pool of one: each actor raises the next error, until there are no more."""
    import ray

    from trustbatch.cluster.actor_pool import ActorPool

    class Frail:  # in here, so that Ray takes it along: other processes don't find this module
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def prepare(self) -> None:
            pass

        def work(self, chunk: int) -> int:
            if self.error is not None:
                raise self.error
            return chunk

    remote: Any = ray.remote(num_cpus=0)(Frail)
    return ActorPool(
        "engine",
        lambda number: remote.remote(errors.pop(0) if errors else None),
        size=1,
        start_seconds=60.0,
        work_seconds=60.0,
        max_restarts=max_restarts,
        deadline_key="cluster.generate_seconds",
    )


def test_an_actor_without_its_own_process_counts_as_dead_and_other_errors_end_the_run() -> None:
    def work(actor: Any, chunk: int) -> Any:
        return actor.work.remote(chunk)

    dead = DeadEngineError("vLLM ended.")
    pool = frail_crew([dead], max_restarts=1)
    assert pool.run([1, 2], work, lambda worker, result: None) == [1, 2]
    assert (pool.restarts, pool.last_death) == (1, "engine 0 was replaced: vLLM ended.")
    pool.close()

    pool = frail_crew([dead, dead], max_restarts=1)
    with pytest.raises(EngineError, match=r"2 processes in a row .* of engine 0 \(vLLM ended\)"):
        pool.run([1, 2], work, lambda worker, result: None)
    pool.close()

    pool = frail_crew([EngineError("The prompt is too long.")], max_restarts=1)
    with pytest.raises(EngineError, match=r"^The prompt is too long\.$"):
        pool.run([1, 2], work, lambda worker, result: None)
    assert pool.restarts == 0
    pool.close()


@pytest.mark.slow
def test_two_trainers_are_two_ranks_of_torchrun_and_nothing_listens_beyond_loopback(
    tiny_folder: Path, tmp_path: Path
) -> None:
    settings = {"prompts_per_call": 1}  # ranks of torchrun divide a batch in another way
    length = {"steps": 3, "learning_rate": 1e-3}
    config = {
        "model": {"name": str(tiny_folder), "device": "cpu"},
        "task": {"name": "arithmetic", "level": 1},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_tokens": 4,
            "temperature": 1.1,
            "lag": 1,
            **settings,
        },
        "training": length,
        "evaluation": EVALUATION,
        "run": {"folder": str(tmp_path / "sync"), "checkpoint_every": 3, "rollouts_every": 1},
    }
    (tmp_path / "config.toml").write_text(parse_config(config).to_toml())
    forked.in_ranks(2, main, ["train", str(tmp_path / "config.toml")])
    seen: set[tuple[int, str]] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            seen.update(listening(descendants(os.getpid())))

    watcher = threading.Thread(target=watch)
    watcher.start()
    on_cluster = {
        "rollout": settings,
        "training": length,
        "evaluation": EVALUATION,
        "cluster": {"trainers": 2, "engines": 1, "max_lag": 1, "weight_transfer": "process_group"},
    }
    try:
        stopped = run(tiny_folder, tmp_path / "async", is_asked_to_stop=lambda: True, **on_cluster)
        assert_stopped(stopped, step=1)
        actual = run(tiny_folder, tmp_path / "async", **on_cluster)
    finally:
        ended.set()
        watcher.join()
    folder = tmp_path / "sync" / "run"
    expected = trustbatch.RunResult(
        folder=folder, checkpoint=folder / "checkpoints" / "step-3", metrics=read_metrics(folder)
    )
    assert_same(actual, expected)
    assert evaluated(actual) == evaluated(expected)
    assert [line["step"] for line in actual.metrics if EVALUATED in line] == [0, 2, 3]
    assert {address for _, address in seen} <= set(LOOPBACK)
    servers = [pid for pid in descendants(os.getpid()) if program(pid) in ("raylet", "gcs_server")]
    assert len(servers) == 2
    assert {pid for pid, _ in seen} >= set(servers)
    for pid in servers:
        assert b"RAY_USAGE_STATS_ENABLED=0" in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.long
def test_a_dead_trainer_ends_the_run_and_the_same_command_goes_on(
    tiny_folder: Path, tmp_path: Path
) -> None:
    settings = {
        "training": {"steps": 60, "learning_rate": 1e-3},
        "run": {"folder": str(tmp_path), "checkpoint_every": 2},
    }
    killer = kill_meanwhile(tmp_path / "run", [(4, "TrainerActor", 1)])
    with pytest.raises(EngineError, match=r"Trainer \d died: .* from its last checkpoint"):
        run(tiny_folder, tmp_path, cluster={"trainers": 2, "engines": 1}, **settings)
    killer.join()
    deadline = time.monotonic() + 60
    while actors("TrainerActor") or actors("EngineActor") or actors("RewardActor"):
        assert time.monotonic() < deadline, "processes outlive the run that they belong to"
        time.sleep(0.1)
    assert 4 <= len(read_metrics(tmp_path / "run")) < 60
    again = run(tiny_folder, tmp_path, cluster={"trainers": 1, "engines": 1}, **settings)
    assert [line["step"] for line in again.metrics] == list(range(1, 61))
    assert {line["rollout/lag_max"] for line in again.metrics[1:]} == {1.0}


def program(pid: int) -> str:
    try:
        return Path(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]).name
    except OSError:
        return ""
