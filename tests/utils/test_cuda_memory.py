"""A limit on a GPU's memory, and what is free below it, with numbers in place of a GPU."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trustbatch.build import policies
from trustbatch.config import parse_config
from trustbatch.utils.cuda_memory import (
    EXPANDABLE,
    GIB,
    VARIABLES,
    enable_expandable_segments,
    free_memory,
    limit_memory,
    usable_memory,
)

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of 80 GiB, of which others have 10 and this process has reserved 6."""
    state = SimpleNamespace(fraction=1.0, free=64.0, allocated=5.0, reserved=6.0)
    for name, answer in {
        "mem_get_info": lambda _: (int(state.free * GIB), 80 * GIB),
        "memory_allocated": lambda _: int(state.allocated * GIB),
        "memory_reserved": lambda _: int(state.reserved * GIB),
        "get_per_process_memory_fraction": lambda _: state.fraction,
        "set_per_process_memory_fraction": lambda value, _: setattr(state, "fraction", value),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return state


def test_without_a_limit_all_that_is_free_can_be_used(device: SimpleNamespace) -> None:
    limit_memory(24.0, CPU)
    assert device.fraction == 1.0
    assert free_memory(GPU) == 65 * GIB  # 64, and one that is reserved and not in use
    assert usable_memory(GPU) == 80 * GIB


def test_a_limit_leaves_its_rest(device: SimpleNamespace) -> None:
    limit_memory(24.0, GPU)
    assert device.fraction == 23 / 80  # one is CUDA's own
    assert free_memory(GPU) == pytest.approx(18 * GIB)
    assert usable_memory(GPU) == pytest.approx(24 * GIB)
    device.free = 3.0
    assert free_memory(GPU) == pytest.approx(4 * GIB)
    limit_memory(100.0, GPU)
    assert device.fraction == 1.0


def test_the_configuration_s_limit_is_set_before_a_model_is_loaded(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[float, str]] = []
    monkeypatch.setattr(
        policies, "limit_memory", lambda gib, device: limits.append((gib, device.type))
    )
    model = {"name": str(tiny_folder), "device": "cpu", "gpu_memory_limit_gib": 24}
    policies.load_model(parse_config({"model": model, "task": {"name": "arithmetic"}}))
    assert limits == [(24.0, "cpu")]


@pytest.mark.parametrize("is_in_use", [False, True])
@pytest.mark.parametrize("given", [None, *VARIABLES])
def test_expandable_segments_are_enabled_unless_the_user_has_said_something(
    is_in_use: bool, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator reads the variable at the GPU's first use, and must be told after it."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_in_use)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv(given, "max_split_size_mb:512")
    enable_expandable_segments()
    set_now = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    assert set_now == ({given: "max_split_size_mb:512"} if given else {VARIABLES[0]: EXPANDABLE})
    assert told == ([EXPANDABLE] if is_in_use and not given else [])
