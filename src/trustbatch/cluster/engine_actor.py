"""An engine in a process of its own, with a copy of the policy."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import ray
import torch
from torch import Tensor

from trustbatch.cluster.publishers import this_endpoint
from trustbatch.config import Config
from trustbatch.engines import Engines, open_engines
from trustbatch.errors import DeadEngineError, EngineError
from trustbatch.models.policy import Policy, default_precision, quiet_bars
from trustbatch.rollout.engine import InFlightEngine
from trustbatch.rollout.registry import engine_info
from trustbatch.session import load_model
from trustbatch.training.canary_reference import CanaryReference
from trustbatch.types import Completion, GenerationRequest
from trustbatch.utils.cuda_memory import enable_expandable_segments
from trustbatch.utils.distributed import rank_device
from trustbatch.weight_sync.publications import Publication

NOTHING_LOADED = -1
OFFERS = "offers"
"""Ray's name for the thread of an actor that hears of new versions while another one samples"""


@dataclass(frozen=True)
class PublishedVersion:
    """A version of the policy that engines may be asked to sample from."""

    version: int
    weights: Publication
    reference: CanaryReference | None
    """what an engine is checked against before it samples; none where no check is due"""


@dataclass(frozen=True)
class Sampled:
    """What an engine did in one call."""

    completions: list[Completion]
    canary: dict[str, float]
    """how far it was off at most, if it took over a version and was checked"""
    version: int
    """that it sampled from last"""


class EngineActor:
    """Samples completions from whichever version it is asked for."""

    def __init__(self, config: Config, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # the last bits of a sum depend on it
        self._config = config
        self._engines: Engines | None = None
        self._served = NOTHING_LOADED  # loaded, and found right where a check was due
        self._newest: PublishedVersion | None = None  # of those that were offered
        self._hearing = threading.Lock()
        self._canary: dict[str, float] = {}  # the worst of a call

    def prepare(self) -> None:
        """Load the model; not before someone waits, who then hears why that is impossible."""
        if self._engines is None:
            config = _undivided(_on_own_device(self._config))
            if engine_info(config.rollout.engine).expandable_segments:
                enable_expandable_segments()
            with quiet_bars():
                policy = _load_policy(config)
            self._engines = open_engines(config, policy, None, version=NOTHING_LOADED)

    def generate(
        self,
        published: PublishedVersion,
        requests: Sequence[GenerationRequest],
        *,
        alone: bool = False,
    ) -> Sampled:
        """Sample from a version, after taking it over and being checked if it is another one.

        `alone` leaves second policies aside.
        """
        engines = self._ready()
        try:
            self._load(published)
            return self._sampled((engines.trained if alone else engines.all).generate(requests))
        except DeadEngineError:
            engines.all.close()  # or its files would outlive this actor, which is replaced now
            raise

    def generate_in_flight(
        self, published: PublishedVersion, requests: Sequence[GenerationRequest]
    ) -> Sampled:
        """Sample from a version or the newest one offered, and from those offered meanwhile."""
        engines = self._ready()
        trained = cast(InFlightEngine, engines.trained)  # the configuration was checked
        self.offer(published)
        self.apply()
        trained.newer_weights = self
        try:
            return self._sampled(engines.all.generate(requests))
        finally:
            trained.newer_weights = None

    def offer(self, published: PublishedVersion) -> None:
        """Hear of a version, perhaps from another thread in the midst of `generate_in_flight`."""
        with self._hearing:
            if self._newest is None or published.version > self._newest.version:
                self._newest = published

    def has_newer(self, version: int) -> bool:
        """Whether a newer version was offered; the engine asks between two tokens."""
        return self._newest is not None and self._newest.version > version

    def apply(self) -> None:
        """Load the newest version that was offered."""
        assert self._newest is not None
        self._load(self._newest)

    def _ready(self) -> Engines:
        self.prepare()
        assert self._engines is not None
        self._canary = {}
        return self._engines

    def _load(self, published: PublishedVersion) -> None:
        """Take a version over, unless it is there, and check it before it is sampled from."""
        assert self._engines is not None
        if self._served == published.version:
            return
        self._served = NOTHING_LOADED  # a version that fails its check is never sampled from
        trained = self._engines.trained
        trained.load_weights(published.weights.tensors(this_endpoint()), published.version)
        if published.reference is not None:
            for name, value in published.reference.check(trained).items():
                self._canary[name] = max(self._canary.get(name, 0.0), value)
        self._served = published.version

    def _sampled(self, completions: Sequence[Completion]) -> Sampled:
        on_host = [_on_host(completion) for completion in completions]
        return Sampled(on_host, self._canary, self._served)


def _undivided(config: Config) -> Config:
    """Return the configuration of an engine that gets its parts of a batch already divided."""
    if config.cluster is None or not config.cluster.in_flight:
        return config
    rollout = config.rollout.model_copy(update={"prompts_per_call": None})
    return config.model_copy(update={"rollout": rollout})


def _on_own_device(config: Config) -> Config:
    """Return the configuration for the GPU that Ray gave to this actor, its only one."""
    device = config.model.device
    if rank_device(device).type == "cpu":
        return config
    if not torch.cuda.is_available():
        raise EngineError(
            f"model.device = {device!r}, but Ray gave an engine no GPU: set cluster.engine_gpus to "
            "1, or to a part of one that several share."
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"device": "cuda"})})


def _load_policy(config: Config) -> Policy:
    """Load the policy where the engine needs it: in host memory if the engine copies it."""
    shares_parameters = engine_info(config.rollout.engine).shares_parameters
    if shares_parameters or rank_device(config.model.device).type == "cpu":
        return load_model(config).freeze()
    precision = config.model.precision
    if precision == "auto":
        precision = default_precision("cuda")
    update = {"device": "cpu", "precision": precision}
    model = config.model.model_copy(update=update)
    return load_model(config.model_copy(update={"model": model})).freeze()


def _on_host(completion: Completion) -> Completion:
    values = {field.name: getattr(completion, field.name) for field in fields(completion)}
    return replace(
        completion,
        **{name: each.cpu() for name, each in values.items() if isinstance(each, Tensor)},
    )


RemoteEngine = ray.remote(EngineActor)
_remote: Any = ray.remote  # whose type knows nothing of concurrency groups
RemoteEngineInFlight = _remote(concurrency_groups={OFFERS: 1})(EngineActor)
