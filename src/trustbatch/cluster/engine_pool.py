"""The engine pool: many engines behind the interface of one."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from trustbatch.cluster.actor_pool import ActorPool, Work, Worker
from trustbatch.cluster.engine_actor import (
    NEW_VERSIONS,
    GenerationResult,
    OpenEngines,
    PublishedVersion,
    RemoteEngine,
    RemoteEngineInFlight,
)
from trustbatch.cluster.placement import Places, machines
from trustbatch.cluster.publishers import open_publisher
from trustbatch.config import Config
from trustbatch.config.cluster import ClusterConfig
from trustbatch.errors import EngineError
from trustbatch.plan.demand import Demand
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.training.canary import CanaryReference
from trustbatch.types import Completion, GenerationRequest
from trustbatch.utils.chunks import chunks_of
from trustbatch.weight_sync.publications import Publication


class EnginePool:
    """Deals requests to engines in other processes; results do not depend on which engine samples.

    It holds every version that may still be requested. Publishing and sampling may come from
    different threads. It samples from the newest version; `at` gives the same pool at another one,
    and `in_flight` one whose engines load new versions while they sample.
    """

    def __init__(self, config: Config, open_engines: OpenEngines) -> None:
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
        self._publisher = open_publisher(config)  # after the engines have their places
        kind = RemoteEngineInFlight if self.cluster.in_flight else RemoteEngine
        num_threads = torch.get_num_threads()
        self.pool = ActorPool(
            "engine",
            lambda number: kind.options(**self._places.options(number)).remote(
                config, open_engines, num_threads
            ),
            size=self.cluster.engines,
            start_seconds=self.cluster.start_seconds,
            work_seconds=self.cluster.generate_seconds,
            max_restarts=self.cluster.max_restarts,
            deadline_key="cluster.generate_seconds",
            on_replace=lambda actor: self._publisher.drop_engine(actor._actor_id.hex()),
        )

    @property
    def version(self) -> int:
        """The newest version that was published."""
        with self._changing:
            return max(self._published)

    def expect(self, reference: CanaryReference | None) -> None:
        """Check engines against this reference when they load the next published version."""
        self._expected = reference

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Publish a version; engines load it when they are to sample from it.

        With `cluster.in_flight` it is announced to them at once.
        """
        stored = self._publisher.publish(weights, version)
        with self._changing:
            published = ray.put(PublishedVersion(version, stored, self._expected))
            self._published[version] = stored, published
            self._expected = None
        if self.cluster.in_flight:
            # not awaited: the replacement of an engine that dies starts with the newest version
            for worker in self.pool.workers:
                worker.actor.announce.options(concurrency_group=NEW_VERSIONS).remote(published)

    def forget_before(self, version: int) -> None:
        """Free versions that will not be requested again.

        The newest one always stays: the policy may be evaluated at any time.
        """
        with self._changing:
            needed = min(version, max(self._published))
            for old in [each for each in self._published if each < needed]:
                weights, _ = self._published.pop(old)
                self._publisher.forget(weights)

    def at(self, version: int) -> RolloutEngine:
        """Return an engine that samples from a published version."""
        return _EnginePoolAt(self, version)

    def trained(self) -> RolloutEngine:
        """Return an engine that samples from the newest version, without second policies.

        The policy is evaluated by its own samples alone.
        """
        return _EnginePoolAt(self, None, alone=True)

    def in_flight(self) -> RolloutEngine:
        """Return an engine whose tokens always come from the newest version."""
        assert self.cluster.in_flight
        return _EnginePoolInFlight(self)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample from the newest version."""
        return self.sample(requests, self.version)

    def sample(
        self, requests: Sequence[GenerationRequest], version: int, *, alone: bool = False
    ) -> list[Completion]:
        """Return all samples of all requests, in their order, sampled by a published version.

        `alone` leaves second policies aside.
        """
        with self._changing:
            if version not in self._published:
                raise EngineError(
                    f"Version {version} is not published, so no engine can sample it."
                )
            _, published = self._published[version]
        return self._deal(
            requests,
            lambda actor, chunk: actor.generate.remote(published, chunk, alone=alone),
        )

    def sample_in_flight(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return all samples of all requests, in their order, each token by the newest version.

        What an engine that died has left unfinished is sampled by the version that is newest then.
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
        chunks = chunks_of(requests, self.config.rollout.prompts_per_call or share)
        sampled = self.pool.run(chunks, work, self._note)
        return [completion for part in sampled for completion in part.completions]

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
        self.pool.close()
        self._places.close()
        self._publisher.close()

    def _note(self, worker: Worker, sampled: GenerationResult) -> None:
        num_tokens = sum(len(completion.token_ids) for completion in sampled.completions)
        worker.notes["tokens"] = worker.notes.get("tokens", 0.0) + num_tokens
        worker.notes["version"] = sampled.version
        for name, value in sampled.canary.items():
            self._canary[name] = max(self._canary.get(name, 0.0), value)


class _EnginePoolView:
    """The engine pool as an engine for those who only sample."""

    def __init__(self, engine_pool: EnginePool) -> None:
        self.engine_pool = engine_pool

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise AssertionError("weights are published through the engine pool itself")

    def sleep(self) -> None:
        self.engine_pool.sleep()

    def wake(self) -> None:
        self.engine_pool.wake()

    def close(self) -> None:
        """Leave it to the engine pool: it has other versions."""


class _EnginePoolAt(_EnginePoolView):
    """The engine pool at one version, or at the one that is newest when it is asked."""

    def __init__(
        self, engine_pool: EnginePool, version: int | None, *, alone: bool = False
    ) -> None:
        super().__init__(engine_pool)
        self._version = version
        self._alone = alone

    @property
    def version(self) -> int:
        return self.engine_pool.version if self._version is None else self._version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return self.engine_pool.sample(requests, self.version, alone=self._alone)


class _EnginePoolInFlight(_EnginePoolView):
    """The engine pool at the newest version at any time."""

    @property
    def version(self) -> int:
        return self.engine_pool.version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return self.engine_pool.sample_in_flight(requests)
