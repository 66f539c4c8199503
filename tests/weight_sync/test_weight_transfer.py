"""Weights that go from the first trainer's device to an engine's, by a process group of the two."""

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cluster.test_cluster import assert_same, run
from tests.support.processes import LOOPBACK, kill_meanwhile, listening
from torch import Tensor

from trustbatch.cluster.ray_runtime import joined_ray
from trustbatch.config import parse_config
from trustbatch.errors import EngineError
from trustbatch.weight_sync.publications import Endpoint

HOST = "127.0.0.1"
ENDPOINT = Endpoint("", HOST)

if find_spec("ray") is None:  # not imported here: a run does that, with its own settings
    pytest.skip("Ray is not installed", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def ray_at_hand() -> Iterator[None]:
    """One Ray for all tests, whose processes have one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    tree = {"model": {"name": "any"}, "task": {"name": "arithmetic"}, "cluster": {"trainers": 3}}
    with joined_ray(parse_config(tree)):
        yield
    torch.set_num_threads(before)


def some_weights(seed: int = 0) -> list[tuple[str, Tensor]]:
    """Tensors of odd sizes, none at all and a single number of another type among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (), (7,), (0, 4), (64, 33), (1, 1, 2)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[1] = tensors[1].bfloat16()
    return [(f"w{n}", tensor) for n, tensor in enumerate(tensors)]


def assert_equal(actual: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]]) -> None:
    assert [name for name, _ in actual] == [name for name, _ in expected]
    assert all(torch.equal(a, e) for (_, a), (_, e) in zip(actual, expected, strict=True))
    assert {a.dtype for _, a in actual} == {e.dtype for _, e in expected}


def eventually(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_buckets_give_back_what_was_packed(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trustbatch.weight_sync import buckets

    monkeypatch.setattr(buckets, "BUCKET_BYTES", 128)
    weights = some_weights()
    packed = buckets.pack_buckets(weights, dtype=dtype)
    # 3 * 5 floats, one, 7, none: 64 + 16 + 32 + 0 bytes; the next one is larger than any bucket
    assert [len(bucket.layout.specs) for bucket in packed] == [4, 1, 1]
    unpacked = [pair for each in packed for pair in each.layout.tensors(each.content)]
    assert_equal(unpacked, [(name, tensor.to(dtype)) for name, tensor in weights])
    before = [(name, tensor.clone()) for name, tensor in unpacked]
    for _, tensor in weights:
        tensor.zero_()
    assert_equal(unpacked, before)


def test_versions_are_kept_until_they_are_forgotten_and_come_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The receiver is in this process, where an engine has it in its own."""
    from trustbatch.weight_sync.group_publisher import ProcessGroupPublisher

    monkeypatch.setattr("trustbatch.weight_sync.buckets.BUCKET_BYTES", 128)
    publisher = ProcessGroupPublisher(address=HOST, seconds=30.0)
    weights = [some_weights(version) for version in range(3)]
    published = [publisher.publish(each, version) for version, each in enumerate(weights)]
    size = publisher.live_bytes // 3
    contents = [weakref.ref(live.buckets[0].content) for live in publisher._live.values()]
    assert size == sum(layout.num_bytes for layout in published[0].layouts) > 0
    for version in (1, 0, 2):  # an engine may be asked for any of them
        assert_equal(list(published[version].tensors(ENDPOINT)), weights[version])
    assert len(publisher._groups) == 1
    # the rendezvous, and gloo at both ends
    assert {address for _, address in listening({os.getpid()})} <= set(LOOPBACK)

    publisher.forget(published[0])
    publisher.forget(published[1])
    eventually(lambda: [each() is None for each in contents] == [True, True, False], "kept")
    assert publisher.live_bytes == size
    with pytest.raises(
        EngineError, match="Version 1 of the weights was requested after it was dropped"
    ):
        list(published[1].tensors(ENDPOINT))
    next(
        iter(published[2].tensors(ENDPOINT))
    )  # the rest is never taken: this group can't be used again
    gc.collect()
    assert_equal(list(published[2].tensors(ENDPOINT)), weights[2])
    publisher.close()
    assert publisher.live_bytes == 0
    eventually(lambda: contents[2]() is None, "kept")


def test_a_trainer_that_does_not_reply_times_out() -> None:
    from trustbatch.weight_sync.group_publisher import ProcessGroupPublication
    from trustbatch.weight_sync.rendezvous import Rendezvous

    rendezvous = Rendezvous.open(HOST)
    deaf = ProcessGroupPublication(
        rendezvous.address, version=4, layouts=(), on_gpu=False, seconds=0.3
    )
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"Version 4 .* did not arrive .*transfer_seconds = 0\.3"):
        list(deaf.tensors(ENDPOINT))
    assert time.monotonic() - started < 5


@pytest.mark.long
def test_an_engine_that_ends_amid_a_transfer_is_nobody_elses_trouble(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from trustbatch.cluster.publishers import this_endpoint
    from trustbatch.weight_sync.group_publisher import ProcessGroupPublisher

    class Taker:
        def take(self, publication: Any, upset_by: signal.Signals | None) -> float:
            total = 0.0
            for number, (_, tensor) in enumerate(publication.tensors(this_endpoint())):
                total += float(tensor.double().sum())
                if number == 1 and upset_by is not None:
                    os.kill(os.getpid(), upset_by)
            return total

        def start(self) -> None:
            this_endpoint()

    # more than the sockets between two processes hold, in many buckets
    monkeypatch.setattr("trustbatch.weight_sync.buckets.BUCKET_BYTES", 2**22)
    weights = [(f"w{n}", torch.full((2**20,), float(n))) for n in range(32)]
    patient, impatient = (
        ProcessGroupPublisher(address=HOST, seconds=seconds) for seconds in (300.0, 5.0)
    )
    remote: Any = ray.remote(Taker)
    dead, silent, sound = (remote.remote() for _ in range(3))
    # processes that start beside busy others take long, which the deadlines below are not about
    ray.get([engine.start.remote() for engine in (dead, silent, sound)], timeout=120)
    for publisher, engine, manner in (
        (patient, dead, signal.SIGKILL),  # seen at once
        (impatient, silent, signal.SIGSTOP),  # seen at the deadline
    ):
        caplog.clear()
        publication = publisher.publish(weights, 5)
        assert len(publication.layouts) == 32
        call = engine.take.remote(publication, manner)
        eventually(lambda publisher=publisher: bool(publisher._groups), "it does not begin")
        # the other one does not wait for it
        assert ray.get(sound.take.remote(publication, None), timeout=60) == 2**20 * 31 * 16
        eventually(lambda: "An engine did not get version 5" in caplog.text, "it does not end")
        assert list(publisher._groups) == [sound._actor_id.hex()]
        content = weakref.ref(publisher._live[5].buckets[0].content)
        publisher.forget(publication)
        eventually(lambda content=content: content() is None, "whoever sent it holds it")
        publisher.close()
        ray.kill(engine)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(call, timeout=60)
    ray.kill(sound)


@pytest.mark.long
def test_killed_engines_get_what_they_need_and_the_run_is_the_same(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trustbatch.weight_sync.group_publisher import ProcessGroupPublisher

    num_live, num_served = [], []
    publish, serve = ProcessGroupPublisher.publish, ProcessGroupPublisher._serve

    def counted(self: Any, weights: Any, version: int) -> Any:
        publication = publish(self, weights, version)
        num_live.append(len(self._live))
        return publication

    def served(self: Any, request: Any) -> None:
        num_served.append((request.engine, request.version))
        serve(self, request)

    monkeypatch.setattr(ProcessGroupPublisher, "publish", counted)
    monkeypatch.setattr(ProcessGroupPublisher, "_serve", served)
    length = {"training": {"steps": 8, "learning_rate": 1e-3}}
    expected = run(tiny_folder, tmp_path / "sync", rollout={"lag": 1}, **length)
    plan = [(2, "EngineActor", 2)]
    killer = kill_meanwhile(tmp_path / "async" / "run", plan)
    cluster = {"engines": 2, "max_lag": 1, "weight_transfer": "process_group"}
    actual = run(tiny_folder, tmp_path / "async", cluster=cluster, **length)
    killer.join()
    assert_same(actual, expected)
    # at least: who still starts may have had no work when it was killed, and is not missed
    assert actual.metrics[-1]["cluster/engine_restarts"] >= 1
    assert len(num_live) == 9
    assert max(num_live) <= 3  # of versions within the lag, and one that is about to go
    assert len({engine for engine, _ in num_served}) >= 2
    assert {version for _, version in num_served} == set(range(7))


@pytest.mark.parametrize(
    ("asked", "device", "trainers", "ray_gpus", "seen_here", "method"),
    [
        ("auto", "cpu", 1, 0, 0, "shared_memory"),
        ("auto", "auto", 1, 0, 0, "shared_memory"),
        ("process_group", "cpu", 1, 0, 0, "process_group"),
        ("auto", "cpu", 1, 4, 4, "shared_memory"),
        ("auto", "auto", 1, 1, 1, "shared_memory"),  # the trainer's own
        ("process_group", "cuda", 1, 1, 1, "shared_memory"),
        ("auto", "cuda", 1, 1, 2, "process_group"),  # the trainer has kept the other one
        ("auto", "cuda", 1, 8, 1, "process_group"),  # of other machines
        ("auto", "cuda", 6, 8, 1, "process_group"),  # Ray shows a trainer its own only
        ("shared_memory", "cuda", 6, 8, 1, "shared_memory"),
        ("disk", "cuda", 6, 8, 1, "disk"),
    ],
)
def test_auto_is_direct_between_gpus_only(
    asked: str,
    device: str,
    trainers: int,
    ray_gpus: float,
    seen_here: int,
    method: str,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from trustbatch.cluster.publishers import transfer_method

    monkeypatch.setattr("torch.cuda.device_count", lambda: seen_here)
    tree = {
        "model": {"name": str(tiny_folder), "device": device},
        "task": {"name": "arithmetic"},
        "cluster": {"trainers": trainers, "weight_transfer": asked},
    }
    found = transfer_method(parse_config(tree), ray_gpus=ray_gpus, gpu_memory=80 * 2.0**30)
    assert found == method
    assert ("share the only GPU" in caplog.text) == (asked == "process_group" != method)


@pytest.mark.parametrize(
    ("asked", "share", "method"),
    [
        ("auto", 0.19, "process_group"),
        ("auto", 0.21, "shared_memory"),
        ("process_group", 0.21, "process_group"),
    ],
)
def test_auto_is_direct_where_the_versions_leave_room(
    asked: str, share: float, method: str, tiny_folder: Path
) -> None:
    from trustbatch.cluster.publishers import transfer_method
    from trustbatch.plan.demand import published_bytes
    from trustbatch.plan.outline import ModelOutline

    tree = {
        "model": {"name": str(tiny_folder), "device": "cuda"},
        "task": {"name": "arithmetic"},
        "cluster": {"trainers": 6, "weight_transfer": asked},
    }
    config = parse_config(tree)
    memory = published_bytes(config, ModelOutline.read(str(tiny_folder))) / share
    assert transfer_method(config, ray_gpus=8.0, gpu_memory=memory) == method


def test_weights_on_disk_lie_where_no_other_run_has_anything(tmp_path: Path) -> None:
    from trustbatch.cluster.publishers import weights_folder
    from trustbatch.weight_sync.publications import DiskPublisher

    def folder_of(name: str) -> Path:
        cluster = {"weight_transfer": "disk", "transfer_folder": str(tmp_path)}
        run = {"name": name, "folder": str(tmp_path / "runs")}
        tree = {"model": {"name": "any"}, "task": {"name": "arithmetic"}, "run": run}
        return weights_folder(parse_config({**tree, "cluster": cluster}))

    (tmp_path / "weights").mkdir()  # somebody's own
    assert folder_of("a") == folder_of("a") != folder_of("b")
    assert not any(folder_of(name).exists() for name in ("a", "b"))
    running = DiskPublisher(folder_of("a"))
    published = running.publish(some_weights(), 3)
    # the same command once more, which finds out that the run is in use before it publishes
    DiskPublisher(folder_of("a")).close()
    assert_equal(sorted(published.tensors(ENDPOINT)), some_weights())
    restarted = DiskPublisher(folder_of("a"))  # the first one was killed
    restarted.publish(some_weights(), 2)
    assert [file.name for file in folder_of("a").iterdir()] == ["version-2.safetensors"]
    restarted.close()
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
