"""An engine in a process of its own, with a copy of the policy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
import torch

from trustbatch.cluster.publications import Publication
from trustbatch.config import Config
from trustbatch.engines import Engines, open_engines
from trustbatch.errors import EngineError
from trustbatch.gpu_memory import let_memory_be_shared
from trustbatch.policy import Policy, default_precision, quiet_bars
from trustbatch.ranks import rank_device
from trustbatch.rollout.canary_reference import CanaryReference
from trustbatch.session import load_model
from trustbatch.types import Completion, GenerationRequest

NOTHING_LOADED = -1


@dataclass(frozen=True)
class PublishedVersion:
    """A version of the policy that engines may be asked to draw from."""

    version: int
    weights: Publication
    reference: CanaryReference | None
    """what an engine is checked against before it draws; none where no check is due"""


@dataclass(frozen=True)
class Drawn:
    """What an engine did in one call."""

    completions: list[Completion]
    canary: dict[str, float]
    """how far it was off, if it took over a version and was checked"""


class EngineActor:
    """Draws completions from whichever version it is asked for."""

    def __init__(self, config: Config, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # the last bits of a sum depend on it
        self._config = config
        self._engines: Engines | None = None

    def prepare(self) -> None:
        """Load the model; not before someone waits, who then hears why that is impossible."""
        if self._engines is None:
            config = _on_own_device(self._config)
            if config.rollout.engine == "native":
                let_memory_be_shared()
            with quiet_bars():
                policy = _load_policy(config)
            self._engines = open_engines(config, policy, None, version=NOTHING_LOADED)

    def generate(
        self,
        published: PublishedVersion,
        requests: Sequence[GenerationRequest],
        *,
        alone: bool = False,
    ) -> Drawn:
        """Draw from a version, after taking it over and being checked if it is another one.

        `alone` leaves second policies aside.
        """
        self.prepare()
        assert self._engines is not None
        trained, canary = self._engines.trained, {}
        if trained.version != published.version:
            trained.load_weights(published.weights.tensors(), published.version)
            if published.reference is not None:
                canary = published.reference.check(trained)
        completions = (trained if alone else self._engines.all).generate(requests)
        return Drawn([_on_host(completion) for completion in completions], canary)


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
    """Load the policy where the engine needs it: vLLM has a copy of its own on the GPU."""
    if config.rollout.engine == "native" or rank_device(config.model.device).type == "cpu":
        return load_model(config).freeze()
    precision = config.model.precision
    if precision == "auto":
        precision = default_precision("cuda")
    update = {"device": "cpu", "precision": precision}
    model = config.model.model_copy(update=update)
    return load_model(config.model_copy(update={"model": model})).freeze()


def _on_host(completion: Completion) -> Completion:
    top, top_logp = completion.top_token_ids, completion.behaviour_top_logp
    return replace(
        completion,
        token_ids=completion.token_ids.cpu(),
        behaviour_logp=completion.behaviour_logp.cpu(),
        top_token_ids=None if top is None else top.cpu(),
        behaviour_top_logp=None if top_logp is None else top_logp.cpu(),
    )


RemoteEngine = ray.remote(EngineActor)
