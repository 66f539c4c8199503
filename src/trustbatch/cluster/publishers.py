"""How the weights of a run reach its engines, and the publisher that uses Ray's object store."""

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from trustbatch.config import Config
from trustbatch.models.policy import default_precision
from trustbatch.plan.demand import published_bytes
from trustbatch.plan.outline import ModelOutline
from trustbatch.rollout.registry import engine_info
from trustbatch.utils.cuda_memory import usable_memory
from trustbatch.weight_sync.group_publisher import ProcessGroupPublisher
from trustbatch.weight_sync.publications import (
    DiskPublisher,
    Endpoint,
    Publisher,
    Weights,
    choose_transfer,
)

WEIGHTS_FOLDER = "weights"


def open_publisher(config: Config) -> Publisher:
    """Return the publisher for the engines of a run."""
    cluster = config.cluster
    assert cluster is not None
    ray_gpus = float(ray.cluster_resources().get("GPU", 0.0))
    method = transfer_method(config, ray_gpus=ray_gpus, gpu_memory=_gpu_memory())
    if method == "disk":
        return DiskPublisher(weights_folder(config))
    if method == "process_group":
        return ProcessGroupPublisher(
            address=ray.util.get_node_ip_address(),
            seconds=cluster.transfer_seconds,
            dtype=engine_dtype(config),
        )
    return ObjectStorePublisher()


def weights_folder(config: Config) -> Path:
    """Return the folder of weights on disk; no other run uses it, since it is deleted.

    It is the same at every start of a run, so that files of a killed process are found.
    """
    assert config.cluster is not None
    run = config.run.path
    if config.cluster.transfer_folder is None:
        return run / WEIGHTS_FOLDER
    digest = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:12]
    return Path(config.cluster.transfer_folder) / f"trustbatch-{WEIGHTS_FOLDER}-{run.name}-{digest}"


def transfer_method(config: Config, *, ray_gpus: float, gpu_memory: float) -> str:
    """Return "process_group", "shared_memory" or "disk".

    Args:
        config: of the run.
        ray_gpus: GPUs that Ray has for actors.
        gpu_memory: bytes of the first trainer's GPU.
    """
    cluster = config.cluster
    assert cluster is not None

    def num_bytes() -> float:
        model = config.model
        outline = ModelOutline.read(model.name, trust_remote_code=model.trust_remote_code)
        return published_bytes(config, outline)

    return choose_transfer(
        cluster.weight_transfer,
        has_gpus=config.model.device != "cpu" and ray_gpus > 0,
        # with several GPUs, a single trainer keeps one, and Ray assigns one to each of several
        shares_only_gpu=cluster.trainers == ray_gpus == torch.cuda.device_count() == 1,
        published_bytes=num_bytes,
        gpu_memory=gpu_memory,
    )


def engine_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype to which engines round all weights when they load them; None if not."""
    precision = config.rollout.precision
    if precision == "auto":
        precision = config.model.precision
    if precision == "auto":
        has_gpu = config.model.device != "cpu" and torch.cuda.is_available()
        precision = default_precision("cuda" if has_gpu else "cpu")
    return engine_info(config.rollout.engine).weight_dtype(precision)


def this_endpoint() -> Endpoint:
    """Return the endpoint of the actor in this process."""
    context = ray.get_runtime_context()
    return Endpoint(context.get_actor_id() or "", ray.util.get_node_ip_address())


def _gpu_memory() -> float:
    if not torch.cuda.is_available():
        return 0.0
    return usable_memory(torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor as plain bytes, which the object store maps without a copy."""

    content: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "_StoredTensor":
        # always a copy: numpy pins the size of memory that FSDP frees later
        plain = tensor.detach().to("cpu", copy=True).contiguous()
        return cls(plain.flatten().view(torch.uint8).numpy(), plain.dtype, tuple(plain.shape))

    def tensor(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # read-only memory, which is never written
            return torch.from_numpy(self.content).view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class ObjectStorePublication:
    """Weights in Ray's object store: once on each machine, in shared memory."""

    reference: list[Any]
    """in a list, so that an engine which already has this version does not fetch it"""

    def tensors(self, endpoint: Endpoint) -> Weights:
        """Map the weights."""
        stored: list[tuple[str, _StoredTensor]] = ray.get(self.reference[0])
        return ((name, each.tensor()) for name, each in stored)


class ObjectStorePublisher:
    """Puts weights into Ray's object store, which frees them with their last reference."""

    def publish(self, weights: Weights, version: int) -> ObjectStorePublication:
        """Copy the weights into shared memory."""
        return ObjectStorePublication(
            [ray.put([(name, _StoredTensor.of(tensor)) for name, tensor in weights])]
        )

    def forget(self, publication: ObjectStorePublication) -> None:
        """Do nothing: the store frees it with its last reference."""

    def drop_engine(self, engine: str) -> None:
        """Do nothing: the store does not depend on its readers."""

    def close(self) -> None:
        """Do nothing: nothing is held."""
