"""The fleet: many engines that look like one."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from trustbatch.cluster.actor_pool import Crew, Work, Worker
from trustbatch.cluster.engine_actor import (
    OFFERS,
    Drawn,
    PublishedVersion,
    RemoteEngine,
    RemoteEngineInFlight,
)
from trustbatch.cluster.placement import Places, machines
from trustbatch.cluster.publications import Publication
from trustbatch.cluster.transfer_method import open_publisher
from trustbatch.config import ClusterConfig, Config
from trustbatch.errors import EngineError
from trustbatch.plan.demand import Demand
from trustbatch.rollout.chunked_engine import parts_of
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.training.canary_reference import CanaryReference
from trustbatch.types import Completion, GenerationRequest


class EngineFleet:
    """Deals requests to engines in other processes; what is drawn does not depend on who draws.

    It holds every version that may still be asked for. Publishing and drawing may come from
    different threads. It draws from the newest version; `at` is the same fleet at another one, and
    `in_flight` one whose engines take over new versions while they draw.
    """

    def __init__(self, config: Config) -> None:
        assert config.cluster is not None
        self.config = config
        self.cluster: ClusterConfig = config.cluster
        self._published: dict[int, tuple[Publication, Any]] = {}
        self._expected: CanaryReference | None = None
        self._changing = threading.Lock()
        self._canary: dict[str, float] = {}
        self._places = Places(
            Demand.of(config, machines()).engines, seconds=self.cluster.start_seconds
        )
        self._publisher = open_publisher(config)  # not before there is room for anybody to send to
        kind = RemoteEngineInFlight if self.cluster.in_flight else RemoteEngine
        num_threads = torch.get_num_threads()
        self.crew = Crew(
            "engine",
            lambda number: kind.options(**self._places.options(number)).remote(config, num_threads),
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
        """Publish a version; engines take it over when they are asked to draw from it.

        With `cluster.in_flight` they are told of it at once.
        """
        stored = self._publisher.publish(weights, version)
        with self._changing:
            published = ray.put(PublishedVersion(version, stored, self._expected))
            self._published[version] = stored, published
            self._expected = None
        if self.cluster.in_flight:
            # not awaited: one that dies is replaced by one that is given the newest version
            for worker in self.crew.workers:
                worker.actor.offer.options(concurrency_group=OFFERS).remote(published)

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

    def in_flight(self) -> RolloutEngine:
        """Return the fleet as an engine that always draws from the newest version there is."""
        assert self.cluster.in_flight
        return _FleetInFlight(self)

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
        return self._deal(
            requests,
            lambda actor, chunk: actor.generate.remote(published, chunk, alone=alone),
        )

    def draw_in_flight(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return all samples of all requests, in their order, each token by the newest version.

        What an engine that died has left unfinished is drawn by the version that is newest then.
        """
        return self._deal(
            requests,
            lambda actor, chunk: actor.generate_in_flight.remote(self._newest(), chunk),
        )

    def _newest(self) -> Any:
        with self._changing:
            return self._published[max(self._published)][1]

    def _deal(self, requests: Sequence[GenerationRequest], work: Work) -> list[Completion]:
        share = -(-len(requests) // self.cluster.engines)
        chunks = parts_of(requests, self.config.rollout.prompts_per_call or share)
        drawn = self.crew.run(chunks, work, self._note)
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
        worker.notes["version"] = drawn.version
        for name, value in drawn.canary.items():
            self._canary[name] = max(self._canary.get(name, 0.0), value)


class _FleetView:
    """The fleet as an engine for those who only draw."""

    def __init__(self, fleet: EngineFleet) -> None:
        self.fleet = fleet

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise AssertionError("weights are published through the fleet itself")

    def sleep(self) -> None:
        self.fleet.sleep()

    def wake(self) -> None:
        self.fleet.wake()

    def close(self) -> None:
        """Leave it to the fleet: it has other versions."""


class _FleetAt(_FleetView):
    """The fleet at one version, or at the one that is newest when it is asked."""

    def __init__(self, fleet: EngineFleet, version: int | None, *, alone: bool = False) -> None:
        super().__init__(fleet)
        self._version = version
        self._alone = alone

    @property
    def version(self) -> int:
        return self.fleet.version if self._version is None else self._version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return self.fleet.draw(requests, self.version, alone=self._alone)


class _FleetInFlight(_FleetView):
    """The fleet at the newest version at any time."""

    @property
    def version(self) -> int:
        return self.fleet.version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return self.fleet.draw_in_flight(requests)
