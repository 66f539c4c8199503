"""Out-of-memory errors: the phase, the memory in use, and what to change."""

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
from trustbatch.utils.system_errors import is_shortage

MIN_REDUCTION = 0.1
"""share of the estimate that advice must save, since the estimate was too low"""


@contextmanager
def memory_advice(config: Config, task: Task, phase: str) -> Iterator[None]:
    """Turn an out-of-memory error of a phase (load, generate, train) into advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        in_use = _memory_in_use(config)
        # the failed frames hold tensors, and the estimate needs memory itself
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemoryError(
            f"Memory ran out in the {phase} phase with {in_use} in use: "
            + _advice(config, task, phase)
        ) from None


def _advice(config: Config, task: Task, phase: str) -> str:
    hardware = _available_hardware(config)
    setting = Setting.of(config, num_gpus=hardware.num_gpus)
    phase_or_all = None if phase == "load" else phase
    try:
        estimator = Estimator.of(config, hardware, task)
        plan = estimator.plan(setting)
        needed = plan.needed if phase_or_all is None else plan.phase(phase_or_all).needed
        limit = min(hardware.capacity, needed * (1 - MIN_REDUCTION))
        advice = advise(estimator, setting, limit=limit, phase=phase_or_all)
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        return (
            "lower training.micro_batch_tokens or rollout.max_sequences, or see the memory plan "
            "with --dry-run."
        )
    return (
        f"it needs about {size(needed)} of {size(hardware.capacity)}, so {advice} "
        "(--dry-run shows the parts)."
    )


def _available_hardware(config: Config) -> Hardware:
    """Return the hardware without the memory of other processes."""
    hardware = find_hardware(config)
    if not hardware.is_gpu:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        is_limited = limit != resource.RLIM_INFINITY
        return replace(hardware, memory=min(hardware.memory, limit)) if is_limited else hardware
    free, total = torch.cuda.mem_get_info()
    of_others = total - free - torch.cuda.memory_reserved()
    return replace(hardware, memory=min(hardware.memory, total - max(of_others, 0)))


def _memory_in_use(config: Config) -> str:
    hardware = find_hardware(config)
    if hardware.is_gpu:
        free, total = torch.cuda.mem_get_info()
        own, others = torch.cuda.memory_reserved(), total - free - torch.cuda.memory_reserved()
        of_all = size(min(hardware.memory, total))
        return f"{size(own)} (and {size(others)} by others and CUDA) of {of_all}"
    # kilobytes, but bytes on a Mac
    unit = 1 if sys.platform == "darwin" else 1024
    return size(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
