"""Offload and a limit on memory, on a real GPU."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.training_cases import sample_sequences, train

from trustbatch.models.policy import Policy
from trustbatch.training.host_memory import MAX_WRITING, HostActivations
from trustbatch.utils.cuda_memory import CUDA_OVERHEAD, GIB, VARIABLES, free_memory, limit_memory

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda")  # without a number, as model.device names it


@pytest.fixture
def policy(tiny_folder: Path) -> Policy:
    return Policy.load(str(tiny_folder), device="cuda", precision="bfloat16")


@pytest.fixture
def limited() -> Iterator[None]:
    """A process that may use 4 GiB, of which CUDA takes one."""
    limit_memory(4.0, DEVICE)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())


def test_offload_gives_the_same_weights(policy: Policy) -> None:
    # short ones that share no prompt: a GPU adds up gradients of shared prompts, and of attention
    # over several blocks of keys, by atomic additions in no fixed order
    sequences = sample_sequences(policy)[1::5]
    other = copy.deepcopy(policy)
    train(policy, sequences, num_steps=3, gradient_checkpointing=True)
    moved = train(
        other,
        sequences,
        num_steps=3,
        gradient_checkpointing=True,
        activation_offload=True,
        optimizer_offload=True,
    )
    for (name, one), (_, two) in zip(
        policy.trained_parameters(), other.trained_parameters(), strict=True
    ):
        assert torch.equal(one, two), name
        state = moved.optimizer.state[two]
        assert state["exp_avg"].is_pinned()
        assert state["exp_avg_sq"].is_pinned()


def test_saved_tensors_leave_the_device_and_come_back_unchanged() -> None:
    """Products that write to the memory of those before them, as soon as it is free."""
    size, depth = 2048, 12
    start = torch.randn(size, size, device=DEVICE, requires_grad=True)

    def run(hooks: HostActivations | None) -> tuple[torch.Tensor, int]:
        start.grad = None
        before = torch.cuda.memory_allocated()
        out = start
        for _ in range(depth):
            if hooks is None:
                out = out.sin()
            else:
                with hooks:
                    out = out.sin()  # saves its input
        kept = torch.cuda.memory_allocated() - before
        out.sum().backward()
        assert start.grad is not None
        return start.grad, kept // (4 * size**2)

    expected, all_kept = run(None)
    assert all_kept == depth
    for _ in range(20):
        gradient, kept = run(HostActivations())
        assert torch.equal(gradient, expected)
        assert kept <= 1 + MAX_WRITING


def test_segments_are_expandable_also_where_the_gpu_is_in_use_already() -> None:
    code = """
import torch
from trustbatch.utils.cuda_memory import enable_expandable_segments
before = torch.empty(2**26, device="cuda")
enable_expandable_segments()
after = torch.empty(2**26, device="cuda")
print([segment["is_expandable"] for segment in torch.cuda.memory_snapshot()])
"""
    environment = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert sorted(done.stdout.strip("[]\n").split(", ")) == ["False", "True"]


@pytest.mark.usefixtures("limited")
def test_a_limited_process_gets_no_more() -> None:
    torch.cuda.empty_cache()
    room = free_memory(DEVICE)
    assert room <= 4 * GIB - CUDA_OVERHEAD - torch.cuda.memory_allocated()
    most = torch.empty(int(room * 0.9), dtype=torch.uint8, device=DEVICE)
    assert free_memory(DEVICE) < 0.2 * GIB + 0.1 * room
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(room * 0.2), dtype=torch.uint8, device=DEVICE)
    del most
    assert free_memory(DEVICE) == pytest.approx(room)
