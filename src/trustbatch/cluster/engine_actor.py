"""An engine in a process of its own, with a copy of the policy."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import ray
import torch
from torch import Tensor

from trustbatch.cluster.publishers import this_endpoint
from trustbatch.config import Config
from trustbatch.errors import DeadEngineError
from trustbatch.rollout.engine import Engines, InFlightEngine
from trustbatch.training.arrival import ArrivalWatch
from trustbatch.training.canary import CanaryReference
from trustbatch.types import Completion, GenerationRequest
from trustbatch.weight_sync.publications import Publication

OpenEngines = Callable[[Config, int], Engines]
"""starts the engines of an actor, at a version"""
NOTHING_LOADED = -1
NEW_VERSIONS = "new_versions"
"""concurrency group of an actor: its thread is told of new versions while another one samples"""


@dataclass(frozen=True)
class PublishedVersion:
    """A version of the policy that engines may be asked to sample from."""

    version: int
    weights: Publication
    reference: CanaryReference | None
    """what an engine is checked against before it samples; none where no check is due"""


@dataclass(frozen=True)
class GenerationResult:
    """What an engine did in one call."""

    completions: list[Completion]
    canary: dict[str, float]
    """largest differences measured by the canary, if a version was loaded and checked"""
    version: int
    """the last one it sampled from"""


class EngineActor:
    """Samples completions from whichever version it is asked for."""

    def __init__(self, config: Config, open_engines: OpenEngines, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # the last bits of a sum depend on it
        self._config = config
        self._open_engines = open_engines
        self._engines: Engines | None = None
        self._served = NOTHING_LOADED  # loaded, and checked where a check was due
        self._newest: PublishedVersion | None = None  # of those it was told of
        self._lock = threading.Lock()
        self._canary: dict[str, float] = {}  # the largest of a call
        self._watch = ArrivalWatch()

    def prepare(self) -> None:
        """Load the model: only when a caller waits, who then gets the error if that fails."""
        if self._engines is None:
            self._engines = self._open_engines(self._config, NOTHING_LOADED)

    def generate(
        self,
        published: PublishedVersion,
        requests: Sequence[GenerationRequest],
        *,
        alone: bool = False,
    ) -> GenerationResult:
        """Sample from a version; loads and checks it first if it is not the current one.

        `alone`: the trained policy only, without second policies.
        """
        engines = self._ready()
        try:
            self._load(published)
            return self._result((engines.trained if alone else engines.all).generate(requests))
        except DeadEngineError:
            engines.all.close()  # or its files would outlive this actor, which is replaced now
            raise

    def generate_in_flight(
        self, published: PublishedVersion, requests: Sequence[GenerationRequest]
    ) -> GenerationResult:
        """Sample from this version or a newer one, and switch to those announced meanwhile."""
        engines = self._ready()
        trained = cast(InFlightEngine, engines.trained)  # the configuration was checked
        self.announce(published)
        self.apply()
        trained.newer_weights = self
        try:
            return self._result(engines.all.generate(requests))
        finally:
            trained.newer_weights = None

    def announce(self, published: PublishedVersion) -> None:
        """Take note of a version; may come from another thread during `generate_in_flight`."""
        with self._lock:
            if self._newest is None or published.version > self._newest.version:
                self._newest = published

    def has_newer(self, version: int) -> bool:
        """Whether a newer version was announced; the engine asks between two tokens."""
        return self._newest is not None and self._newest.version > version

    def apply(self) -> None:
        """Load the newest version that was announced."""
        assert self._newest is not None
        self._load(self._newest)

    def _ready(self) -> Engines:
        self.prepare()
        assert self._engines is not None
        self._canary = {}
        return self._engines

    def _load(self, published: PublishedVersion) -> None:
        """Load a version unless it is loaded, and check it before it is sampled from."""
        assert self._engines is not None
        if self._served == published.version:
            return
        self._served = NOTHING_LOADED  # a version that fails its check is never sampled from
        trained = self._engines.trained
        trained.load_weights(published.weights.tensors(this_endpoint()), published.version)
        if published.reference is not None:
            for name, value in published.reference.check(trained, self._watch).items():
                self._canary[name] = max(self._canary.get(name, 0.0), value)
        self._served = published.version

    def _result(self, completions: Sequence[Completion]) -> GenerationResult:
        on_host = [_on_host(completion) for completion in completions]
        return GenerationResult(on_host, self._canary, self._served)


def _on_host(completion: Completion) -> Completion:
    values = {field.name: getattr(completion, field.name) for field in fields(completion)}
    return replace(
        completion,
        **{name: each.cpu() for name, each in values.items() if isinstance(each, Tensor)},
    )


RemoteEngine = ray.remote(EngineActor)
_remote: Any = ray.remote  # whose type knows nothing of concurrency groups
RemoteEngineInFlight = _remote(concurrency_groups={NEW_VERSIONS: 1})(EngineActor)
