"""How weights travel in a run: what cluster.weight_transfer says, or what "auto" makes of it."""

import hashlib
import logging
from pathlib import Path

import ray
import torch

from trustbatch.cluster.direct import DirectPublisher
from trustbatch.cluster.publications import DiskPublisher, Publisher, SharedMemoryPublisher
from trustbatch.config import Config
from trustbatch.models.loading import default_precision
from trustbatch.plan.demand import keeps_published_on_gpu, published_bytes
from trustbatch.plan.outline import ModelOutline

logger = logging.getLogger(__name__)

WEIGHTS_FOLDER = "weights"


def open_publisher(config: Config) -> Publisher:
    """Return what makes weights available to the engines of a run."""
    cluster = config.cluster
    assert cluster is not None
    ray_gpus = float(ray.cluster_resources().get("GPU", 0.0))
    method = transfer_method(config, ray_gpus=ray_gpus, gpu_memory=_gpu_memory())
    if method == "disk":
        return DiskPublisher(weights_folder(config))
    if method == "process_group":
        return DirectPublisher(seconds=cluster.transfer_seconds, dtype=engine_dtype(config))
    return SharedMemoryPublisher()


def weights_folder(config: Config) -> Path:
    """Return where weights on disk lie: a folder that no other run has, since all of it is deleted.

    It is the same at every start of a run, which so finds what a killed one has left.
    """
    assert config.cluster is not None
    run = config.run.path
    if config.cluster.transfer_folder is None:
        return run / WEIGHTS_FOLDER
    mark = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:12]
    return Path(config.cluster.transfer_folder) / f"trustbatch-{WEIGHTS_FOLDER}-{run.name}-{mark}"


def transfer_method(config: Config, *, ray_gpus: float, gpu_memory: float) -> str:
    """Return "process_group", "shared_memory" or "disk".

    For a Ray that has so many GPUs to give, and a first trainer whose GPU has so many bytes.
    """
    cluster = config.cluster
    assert cluster is not None
    asked = cluster.weight_transfer
    if asked in ("shared_memory", "disk"):
        return asked
    if config.model.device == "cpu" or not ray_gpus:
        return "process_group" if asked == "process_group" else "shared_memory"
    # of several GPUs, a single trainer has kept one to itself, and several are given theirs by Ray
    if cluster.trainers == ray_gpus == torch.cuda.device_count() == 1:
        if asked == "process_group":
            logger.warning(
                "Engines and trainer share the only GPU, where NCCL can't tell them apart: weights "
                'go through shared memory; set cluster.weight_transfer to "auto".'
            )
        return "shared_memory"
    outline = ModelOutline.read(config.model.name, trust_remote_code=config.model.trust_remote_code)
    num_bytes = published_bytes(config, outline.num_parameters)
    if keeps_published_on_gpu(config, num_bytes, gpu_memory=gpu_memory):
        return "process_group"
    return "shared_memory"


def _gpu_memory() -> float:
    if not torch.cuda.is_available():
        return 0.0
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def engine_dtype(config: Config) -> torch.dtype | None:
    """Return what engines round all weights to as they take them over; None if they don't."""
    if config.rollout.engine != "vllm":
        return None  # the native engine has float32, and rounds what some products use
    precision = config.rollout.precision
    if precision == "auto":
        precision = config.model.precision
    if precision == "auto":
        has_gpu = config.model.device != "cpu" and torch.cuda.is_available()
        precision = default_precision("cuda" if has_gpu else "cpu")
    # FP8 is made from the bfloat16 values
    return getattr(torch, "bfloat16" if precision == "fp8" else precision)
