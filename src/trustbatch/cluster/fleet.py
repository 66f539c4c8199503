"""The fleet: many engines that look like one."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from trustbatch.cluster.crew import Crew, Worker
from trustbatch.cluster.engine_actor import Drawn, PublishedVersion, RemoteEngine
from trustbatch.cluster.placement import Places, machines
from trustbatch.cluster.publications import (
    DiskPublisher,
    Publication,
    Publisher,
    SharedMemoryPublisher,
)
from trustbatch.config import ClusterConfig, Config
from trustbatch.errors import EngineError
from trustbatch.plan.demand import Demand
from trustbatch.rollout.canary_reference import CanaryReference
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.rollout.in_parts import parts_of
from trustbatch.types import Completion, GenerationRequest

WEIGHTS_FOLDER = "weights"


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
        self._publisher = _publisher(self.cluster, config.run.path)
        self._canary: dict[str, float] = {}
        self._places = Places(
            Demand.of(config, machines()).engines, seconds=self.cluster.start_seconds
        )
        num_threads = torch.get_num_threads()
        self.crew = Crew(
            "engine",
            lambda number: RemoteEngine.options(**self._places.options(number)).remote(
                config, num_threads
            ),
            size=self.cluster.engines,
            start_seconds=self.cluster.start_seconds,
            work_seconds=self.cluster.generate_seconds,
            max_restarts=self.cluster.max_restarts,
            deadline_key="cluster.generate_seconds",
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
        """Give back the room of versions that nobody will ask for again.

        The newest one stays, whatever is said: the policy may be evaluated at any time.
        """
        with self._changing:
            needed = min(version, max(self._published))
            for old in [each for each in self._published if each < needed]:
                weights, _ = self._published.pop(old)
                self._publisher.forget(weights)

    def at(self, version: int) -> RolloutEngine:
        """Return the fleet as an engine that draws from a published version."""
        return _FleetAt(self, version)

    def trained(self) -> RolloutEngine:
        """Return the fleet as an engine that draws from the newest version of the policy alone.

        Second policies have no part in what the policy is judged by.
        """
        return _FleetAt(self, None, alone=True)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Draw from the newest version."""
        return self.draw(requests, self.version)

    def draw(
        self, requests: Sequence[GenerationRequest], version: int, *, alone: bool = False
    ) -> list[Completion]:
        """Return all samples of all requests, in their order, drawn by a published version.

        `alone` leaves second policies aside.
        """
        with self._changing:
            if version not in self._published:
                raise EngineError(f"Version {version} is not published, so no engine can draw it.")
            _, published = self._published[version]
        share = -(-len(requests) // self.cluster.engines)
        chunks = parts_of(requests, self.config.rollout.prompts_per_call or share)
        drawn = self.crew.run(
            chunks,
            lambda actor, chunk: actor.generate.remote(published, chunk, alone=alone),
            self._note,
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
        self._places.close()
        self._publisher.close()

    def _note(self, worker: Worker, drawn: Drawn) -> None:
        num_tokens = sum(len(completion.token_ids) for completion in drawn.completions)
        worker.notes["tokens"] = worker.notes.get("tokens", 0.0) + num_tokens
        worker.notes["version"] = drawn.completions[0].provenance.version
        for name, value in drawn.canary.items():
            self._canary[name] = max(self._canary.get(name, 0.0), value)


class _FleetAt:
    """The fleet at one version, or at whichever is the newest."""

    def __init__(self, fleet: EngineFleet, version: int | None, *, alone: bool = False) -> None:
        self.fleet = fleet
        self._version = version
        self._alone = alone

    @property
    def version(self) -> int:
        return self.fleet.version if self._version is None else self._version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return self.fleet.draw(requests, self.version, alone=self._alone)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise AssertionError("weights are published through the fleet itself")

    def sleep(self) -> None:
        self.fleet.sleep()

    def wake(self) -> None:
        self.fleet.wake()

    def close(self) -> None:
        """Leave it to the fleet: it has other versions."""


def _publisher(cluster: ClusterConfig, run: Path) -> Publisher:
    if cluster.weight_transfer == "disk":
        return DiskPublisher(Path(cluster.transfer_folder or run) / WEIGHTS_FOLDER)
    return SharedMemoryPublisher()
