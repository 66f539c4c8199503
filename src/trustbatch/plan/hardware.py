"""The hardware that a run is planned for: this machine, or given GPUs."""

import os
from dataclasses import dataclass, replace

import torch

from trustbatch.config import Config
from trustbatch.plan.demand import gpus_needed
from trustbatch.plan.memory import size
from trustbatch.utils.cuda_memory import CUDA_OVERHEAD, GIB

FRAGMENTATION = 0.04
"""share of a GPU's memory that the allocator can't use"""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A number of equal devices."""

    is_gpu: bool
    num_gpus: int
    """training processes; also without a GPU"""
    memory: float
    """bytes per device"""
    name: str
    num_available: int
    """GPUs that a plan may use"""
    converts_fp8: bool = True
    """compute capability 8.9 or newer, as far as is known"""

    @property
    def capacity(self) -> float:
        """Bytes available to the tensors of one process."""
        return self.memory * (1 - FRAGMENTATION) - CUDA_OVERHEAD if self.is_gpu else self.memory


def find_hardware(
    config: Config, *, num_gpus: int | None = None, gpu_memory: float | None = None
) -> Hardware:
    """Return the hardware of this machine, or `num_gpus` GPUs of `gpu_memory` bytes."""
    hardware = _find_hardware(config, num_gpus=num_gpus, gpu_memory=gpu_memory)
    limit = config.model.gpu_memory_limit_gib
    if limit is None or not hardware.is_gpu or limit * GIB >= hardware.memory:
        return hardware
    name = f"{hardware.name} limited to {size(limit * GIB)}"
    return replace(hardware, memory=limit * GIB, name=name)


def _find_hardware(config: Config, *, num_gpus: int | None, gpu_memory: float | None) -> Hardware:
    device = config.model.device
    num = num_gpus or int(os.environ.get("WORLD_SIZE", "1"))
    num_available = num_gpus
    if config.cluster is not None:
        num = config.cluster.trainers
        if num_gpus is None and (gpu_memory is not None or config.cluster.address):
            num_available = gpus_needed(config)
    if gpu_memory is not None:
        return Hardware(
            is_gpu=True,
            num_gpus=num,
            memory=gpu_memory,
            name=f"cuda ({size(gpu_memory)})",
            num_available=num_available or num,
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        return Hardware(
            is_gpu=True,
            num_gpus=num,
            memory=properties.total_memory,
            name=f"{device} ({properties.name}, {size(properties.total_memory)})",
            num_available=num_available or max(torch.cuda.device_count(), num),
            converts_fp8=torch.cuda.get_device_capability(device) >= (8, 9),
        )
    # the processes on a machine share its memory
    num_processes = num + (config.cluster.engines if config.cluster is not None else 0)
    memory = _machine_memory() / num_processes
    return Hardware(is_gpu=False, num_gpus=num, memory=memory, name=device, num_available=num)


def has_gpu(config: Config) -> bool:
    """Return whether the run would use a GPU of this machine."""
    return torch.cuda.is_available() and config.model.device != "cpu"


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
