"""The memory of a GPU: torch's allocator, copies to it, a limit on this process, what is left."""

import os

import torch
from torch import Tensor

GIB = 2**30
CUDA_OVERHEAD = 1.0 * GIB
"""bytes per GPU outside of torch: CUDA's context, kernels and library workspaces"""
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""environment variables that configure the allocator: the new name, and the deprecated one"""
EXPANDABLE = "expandable_segments:True"


def enable_expandable_segments() -> None:
    """Let all tensor sizes share one memory range, unless the user has configured the allocator.

    Generation and training alternate with tensors of very different sizes: in separate segments,
    the memory that one leaves free cannot be used by the other. vLLM cannot use it, since it shares
    memory with other processes.
    """
    if any(name in os.environ for name in VARIABLES):
        return
    os.environ[VARIABLES[0]] = EXPANDABLE
    if torch.cuda.is_initialized():  # which has read the variable already
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a copy from the host to a GPU waits for no work on that GPU."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def limit_memory(gib: float, device: torch.device) -> None:
    """Let this process use no more than `gib` of a GPU, of which CUDA itself takes a part.

    The allocator keeps the limit, so that it holds for everything that torch allocates.
    """
    if device.type != "cuda":
        return
    _, total = torch.cuda.mem_get_info(device)
    fraction = min((gib * GIB - CUDA_OVERHEAD) / total, 1.0)
    torch.cuda.set_per_process_memory_fraction(fraction, _number(device))


def usable_memory(device: torch.device) -> float:
    """Return the bytes of a GPU that this process may use, with CUDA's own part."""
    _, total = torch.cuda.mem_get_info(device)
    return min(_allowed(device, total) + CUDA_OVERHEAD, float(total))


def free_memory(device: torch.device) -> float:
    """Return the bytes that new tensors can have on a GPU: all questions of room come here."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    return min(float(free + unused), _allowed(device, total) - allocated)


def _allowed(device: torch.device, total: int) -> float:
    return torch.cuda.get_per_process_memory_fraction(_number(device)) * total


def _number(device: torch.device) -> int:
    """Return the number of a GPU; the allocator takes none without."""
    return torch.cuda.current_device() if device.index is None else device.index
