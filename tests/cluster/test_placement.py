"""What the processes of a run ask Ray for, and how it is given to them: bundle by bundle."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trustbatch.cluster.ray_runtime import LOOPBACK, QUIET
from trustbatch.config import Config, parse_config
from trustbatch.errors import ConfigError, EngineError
from trustbatch.plan.demand import Bundles, Demand


def config_with(cluster: dict[str, Any], *, device: str = "auto", **rollout: Any) -> Config:
    tree = {"model": {"name": "any", "device": device}, "task": {"name": "arithmetic"}}
    return parse_config({**tree, "rollout": rollout, "cluster": cluster})


@pytest.fixture(scope="module")
def ray_with_gpus() -> Iterator[None]:
    """A Ray of four processes that believes in three GPUs."""
    os.environ.update(QUIET | LOOPBACK)  # Ray reads them when it is imported
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=4, num_gpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


EIGHT = [{"CPU": 64.0, "GPU": 8.0}]


@pytest.mark.parametrize(
    ("cluster", "rollout", "nodes", "trainers", "engines"),
    [
        ({"trainers": 6, "engines": 2}, {}, EIGHT, [1.0] * 6, [1.0] * 2),
        ({"trainers": 5, "engines": 3}, {}, EIGHT, [1.0] * 5, [1.0] * 3),
        (
            {"trainers": 4, "engines": 2},
            {"engine": "vllm", "vllm": {"tensor_parallel": 2}},
            EIGHT,
            [1.0] * 4,
            [2.0] * 2,
        ),
        ({"trainers": 6, "engines": 4, "engine_gpus": 0.5}, {}, EIGHT, [1.0] * 6, [0.5] * 4),
        # the process that was started trains on a GPU that Ray does not see
        ({"engines": 7}, {}, [{"CPU": 64.0, "GPU": 7.0}], [], [1.0] * 7),
        # or on the only one, with all engines; six times 0.16667 would be more than one to Ray
        ({"engines": 6}, {}, [{"CPU": 16.0, "GPU": 1.0}], [], [0.1666] * 6),
        # a cluster sees all of its GPUs, so a single trainer has to ask for its own
        ({"engines": 7, "address": "auto"}, {}, EIGHT, [1.0], [1.0] * 7),
        ({"trainers": 2, "engines": 2}, {}, [{"CPU": 8.0}], [0.0] * 2, [0.0] * 2),
    ],
    ids=["6/2", "5/3", "tensor parallel", "half a GPU", "one trainer", "one GPU", "joined", "CPU"],
)
def test_the_bundles_are_those_of_the_split(
    cluster: dict[str, Any],
    rollout: dict[str, Any],
    nodes: list[dict[str, float]],
    trainers: list[float],
    engines: list[float],
) -> None:
    demand = Demand.of(config_with(cluster | {"reward_workers": 3}, **rollout), nodes)
    found = [
        [kind.each] * kind.size for kind in (demand.trainers, demand.engines, demand.reward_workers)
    ]
    assert found == [
        [{"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0} for gpus in trainers],
        [{"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0} for gpus in engines],
        [{"CPU": 1.0}] * 3,
    ]
    assert demand.obstacle(nodes) is None


def test_a_run_on_the_cpu_asks_for_no_gpu() -> None:
    demand = Demand.of(config_with({"trainers": 2}, device="cpu"), EIGHT)
    assert (demand.trainers.gpus, demand.engines.gpus) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("cluster", "rollout", "nodes", "sentence"),
    [
        (
            {"trainers": 6, "engines": 3},
            {},
            EIGHT,
            r"Ray has 8 GPU in all, and the run needs 9 \(cluster.trainers = 6 with 1 CPU and 1 "
            r"GPU each, cluster.engines = 3 .*\): lower cluster.trainers or cluster.engines, or",
        ),
        (
            {"trainers": 2, "engines": 2, "reward_workers": 5},
            {},
            [{"CPU": 8.0}],
            "Ray has 8 CPU in all, and the run needs 9 .* or cluster.reward_workers, or add",
        ),
        (
            {"trainers": 4, "engines": 1},
            {"engine": "vllm", "vllm": {"tensor_parallel": 4}},
            [{"CPU": 8.0, "GPU": 2.0}] * 4,
            "Each engine needs 4 GPU on one machine, and the largest has 2: lower "
            r"rollout\.vllm\.tensor_parallel",
        ),
        ({"engines": 1, "engine_gpus": 1}, {}, [{"CPU": 8.0}], "has 0 GPU in all"),
    ],
)
def test_what_can_never_be_placed_is_refused_at_once(
    cluster: dict[str, Any], rollout: dict[str, Any], nodes: list[dict[str, float]], sentence: str
) -> None:
    obstacle = Demand.of(config_with(cluster, **rollout), nodes).obstacle(nodes)
    assert obstacle is not None
    assert re.search(sentence, obstacle)


def test_a_run_that_ray_can_not_hold_ends_before_anything_is_loaded(ray_with_gpus: None) -> None:
    from trustbatch.api import train_config

    with pytest.raises(ConfigError, match="Ray has 3 GPU in all, and the run needs 9"):
        train_config(config_with({"trainers": 6, "engines": 3}))


def test_a_new_actor_gets_the_gpu_of_a_hung_one_when_that_is_gone(ray_with_gpus: None) -> None:
    import ray

    from trustbatch.cluster.actor_pool import ActorPool
    from trustbatch.cluster.placement import Places

    class Member:
        def prepare(self) -> None:
            pass

        def who(self) -> tuple[int, str]:
            return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]

    remote: Any = ray.remote(Member)
    places = Places(Bundles("engine", "cluster.engines", 2, gpus=1.0), seconds=60.0)
    pool = ActorPool(
        "engine",
        lambda number: remote.options(**places.options(number)).remote(),
        size=2,
        start_seconds=1.0,
        work_seconds=1.0,
        max_restarts=1,
        deadline_key="a key",
    )

    def ask(number: int) -> tuple[int, str]:
        return ray.get(pool.workers[number].actor.who.remote(), timeout=60)

    try:
        gpus = [ask(0)[1], ask(1)[1]]
        assert len(set(gpus)) == 2  # of three: a process without a place could have another one
        hung, _ = ask(1)
        os.kill(hung, signal.SIGSTOP)
        pool.run([0, 1], lambda actor, _: actor.who.remote(), lambda *_: None)
        assert pool.restarts == 1
        assert ask(1)[1] == gpus[1]
        assert not Path(f"/proc/{hung}").exists()
    finally:
        pool.close()
        places.close()


def test_room_that_others_have_is_waited_for_and_then_spoken_of(ray_with_gpus: None) -> None:
    from trustbatch.cluster.placement import Places

    first = Places(Bundles("engine", "cluster.engines", 3, gpus=1.0), seconds=30.0)
    sentence = (
        r"Timed out after 1 seconds \(cluster.start_seconds\): Ray can't place cluster.engines = 1 "
        r"with 1 CPU and 1 GPU each; of 4 CPU and 3 GPU in total, 1 CPU and 0 GPU are free; lower "
    )
    try:
        with pytest.raises(EngineError, match=sentence):
            Places(Bundles("engine", "cluster.engines", 1, gpus=1.0), seconds=1.0)
    finally:
        first.close()
    started = time.monotonic()
    Places(Bundles("engine", "cluster.engines", 3, gpus=1.0), seconds=30.0).close()
    assert time.monotonic() - started < 20
