"""Memory that ran out: which phase it was, what was in use, and what to change."""

import resource
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from trustbatch.config import Config
from trustbatch.errors import OutOfMemoryError
from trustbatch.plan.advice import advise
from trustbatch.plan.estimate import Estimator
from trustbatch.plan.hardware import Hardware, find_hardware
from trustbatch.plan.memory import Setting, size
from trustbatch.tasks import Task

WANTED_LESS = 0.1
"""of the estimate: advice saves at least this much, since the estimate was too low"""
REFUSALS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""in what a library's allocator says that raises no error of a type of its own"""


@contextmanager
def memory_advice(config: Config, task: Task, phase: str) -> Iterator[None]:
    """Turn an out-of-memory error of the phase (load, generate, train) into a sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        in_use = _in_use(config)
        # the frames that failed hold what was computed, and the estimate needs room itself
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemoryError(
            f"Memory ran out in the {phase} phase with {in_use} in use: "
            + _what_to_do(config, task, phase)
        ) from None


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that there is no memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in REFUSALS)


def _what_to_do(config: Config, task: Task, phase: str) -> str:
    hardware = _at_hand(config)
    setting = Setting.of(config, num_gpus=hardware.num_gpus)
    of_phase = None if phase == "load" else phase
    try:
        estimator = Estimator.of(config, hardware, task)
        plan = estimator.plan(setting)
        needed = plan.needed if of_phase is None else plan.phase(of_phase).needed
        limit = min(hardware.capacity, needed * (1 - WANTED_LESS))
        advice = advise(estimator, setting, limit=limit, phase=of_phase)
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        return (
            "set training.micro_batch_tokens or rollout.max_sequences lower, or ask for a plan "
            "with --dry-run."
        )
    return (
        f"it needs about {size(needed)} of {size(hardware.capacity)}, so {advice} "
        "(--dry-run shows the parts)."
    )


def _at_hand(config: Config) -> Hardware:
    """Return the hardware without the memory that other processes have taken."""
    hardware = find_hardware(config)
    if not hardware.is_gpu:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        is_limited = limit != resource.RLIM_INFINITY
        return replace(hardware, memory=min(hardware.memory, limit)) if is_limited else hardware
    free, total = torch.cuda.mem_get_info()
    of_others = total - free - torch.cuda.memory_reserved()
    return replace(hardware, memory=total - max(of_others, 0))


def _in_use(config: Config) -> str:
    if find_hardware(config).is_gpu:
        free, total = torch.cuda.mem_get_info()
        own, others = torch.cuda.memory_reserved(), total - free - torch.cuda.memory_reserved()
        return f"{size(own)} (and {size(others)} by others and CUDA) of {size(total)}"
    # kilobytes, but bytes on a Mac
    unit = 1 if sys.platform == "darwin" else 1024
    return size(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
