"""The fleet: many engines that look like one."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from trustbatch.cluster.crew import Crew, Worker
from trustbatch.cluster.engine_actor import Drawn, PublishedVersion, RemoteEngine
from trustbatch.cluster.publications import Publication
from trustbatch.cluster.transfer_method import open_publisher
from trustbatch.config import ClusterConfig, Config
from trustbatch.errors import ConfigError, EngineError
from trustbatch.rollout.canary_reference import CanaryReference
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.rollout.in_parts import parts_of
from trustbatch.types import Completion, GenerationRequest


class EngineFleet:
    """Deals requests to engines in other processes; what is drawn does not depend on who draws.

    It holds every version that may still be asked for. Publishing and drawing may come from
    different threads. It draws from the newest version; `at` is the same fleet at another one.
    """

    def __init__(self, config: Config) -> None:
        assert config.cluster is not None
        self.config = config
        self.cluster: ClusterConfig = config.cluster
        self._published: dict[int, tuple[Publication, Any]] = {}
        self._expected: CanaryReference | None = None
        self._changing = threading.Lock()
        self._publisher = open_publisher(config)
        self._canary: dict[str, float] = {}
        start = RemoteEngine.options(num_cpus=1, num_gpus=gpus_per_engine(config)).remote
        num_threads = torch.get_num_threads()
        self.crew = Crew(
            "engine",
            lambda: start(config, num_threads),
            size=self.cluster.engines,
            start_seconds=self.cluster.start_seconds,
            work_seconds=self.cluster.generate_seconds,
            max_restarts=self.cluster.max_restarts,
            deadline_key="cluster.generate_seconds",
            part_from=lambda actor: self._publisher.part_from(actor._actor_id.hex()),
        )

    @property
    def version(self) -> int:
        """The newest version that was published."""
        with self._changing:
            return max(self._published)

    def expect(self, reference: CanaryReference | None) -> None:
        """Have engines that take over the next published version checked against this."""
        self._expected = reference

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Publish a version; engines take it over when they are asked to draw from it."""
        stored = self._publisher.publish(weights, version)
        with self._changing:
            published = PublishedVersion(version, stored, self._expected)
            self._published[version] = stored, ray.put(published)
            self._expected = None

    def forget_before(self, version: int) -> None:
        """Give back the room of versions that nobody will ask for again."""
        with self._changing:
            for old in [each for each in self._published if each < version]:
                weights, _ = self._published.pop(old)
                self._publisher.forget(weights)

    def at(self, version: int) -> RolloutEngine:
        """Return the fleet as an engine that draws from a published version."""
        return _FleetAt(self, version)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Draw from the newest version."""
        return self.draw(requests, self.version)

    def draw(self, requests: Sequence[GenerationRequest], version: int) -> list[Completion]:
        """Return all samples of all requests, in their order, drawn by a published version."""
        with self._changing:
            if version not in self._published:
                raise EngineError(f"Version {version} is not published, so no engine can draw it.")
            _, published = self._published[version]
        share = -(-len(requests) // self.cluster.engines)
        chunks = parts_of(requests, self.config.rollout.prompts_per_call or share)
        drawn = self.crew.run(
            chunks, lambda actor, chunk: actor.generate.remote(published, chunk), self._note
        )
        return [completion for part in drawn for completion in part.completions]

    def take_canary(self) -> dict[str, float]:
        """Return the largest differences that engines have had since the last call."""
        found, self._canary = self._canary, {}
        return found

    def sleep(self) -> None:
        """Engines go on while the policy is trained: they have processes of their own."""

    def wake(self) -> None:
        """They never slept."""

    def close(self) -> None:
        """End all engines."""
        self.crew.close()
        self._publisher.close()

    def _note(self, worker: Worker, drawn: Drawn) -> None:
        num_tokens = sum(len(completion.token_ids) for completion in drawn.completions)
        worker.notes["tokens"] = worker.notes.get("tokens", 0.0) + num_tokens
        worker.notes["version"] = drawn.completions[0].provenance.version
        for name, value in drawn.canary.items():
            self._canary[name] = max(self._canary.get(name, 0.0), value)


class _FleetAt:
    """The fleet at one version."""

    def __init__(self, fleet: EngineFleet, version: int) -> None:
        self.fleet = fleet
        self.version = version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return self.fleet.draw(requests, self.version)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise AssertionError("weights are published through the fleet itself")

    def sleep(self) -> None:
        self.fleet.sleep()

    def wake(self) -> None:
        self.fleet.wake()

    def close(self) -> None:
        """Leave it to the fleet: it has other versions."""


def gpus_per_engine(config: Config) -> float:
    """Return how many GPUs each engine asks Ray for; refuses what Ray could never place."""
    cluster = config.cluster
    assert cluster is not None
    there = float(ray.cluster_resources().get("GPU", 0.0))
    if config.model.device == "cpu" or not there:
        return cluster.engine_gpus or 0.0
    # a single trainer is the process that started Ray, and has kept its GPU to itself
    left = there - (cluster.trainers if cluster.trainers > 1 else 0)
    whole = config.rollout.vllm.tensor_parallel if config.rollout.engine == "vllm" else 1
    wanted = float(whole) if cluster.engine_gpus is None else cluster.engine_gpus
    if cluster.engine_gpus is None and cluster.trainers == there == wanted == 1:
        return 1.0 / cluster.engines  # all on the only one
    if wanted * cluster.engines > left:
        raise ConfigError(
            f"cluster.engines = {cluster.engines} with {wanted:g} GPUs each need more than the "
            f"{left:g} that {cluster.trainers} trainers leave: lower cluster.engines, "
            "cluster.trainers or cluster.engine_gpus."
        )
    return wanted
