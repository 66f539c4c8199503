"""How weights travel: every way delivers the same values, and a full disk is found in time."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trustbatch.errors import EngineError
from trustbatch.weight_sync import weight_chunks
from trustbatch.weight_sync.weight_chunks import (
    ChunkSender,
    InProcessSender,
    SharedMemorySender,
    open_chunk,
)

READER = """
import sys
from trustbatch.weight_sync.weight_chunks import open_chunk
for name, tensor in open_chunk(sys.stdin.buffer.read()):
    print(name, tensor.dtype, list(tensor.shape), tensor.double().sum().item())
"""


def some_weights() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (5, 3), "a.bias": (5,), "b.scale": (), "c.weight": (64, 7)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def senders(dtype: torch.dtype, folder: Path) -> list[ChunkSender]:
    return [InProcessSender(dtype), SharedMemorySender(dtype, str(folder))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_delivers_the_rounded_values(dtype: torch.dtype, tmp_path: Path) -> None:
    for sender in senders(dtype, tmp_path):
        for _ in range(2):  # the shared file is used again
            received = [
                pair for chunk in sender.chunks(some_weights()) for pair in open_chunk(chunk)
            ]
            assert [name for name, _ in received] == [name for name, _ in some_weights()]
            for (_, tensor), (_, sent) in zip(received, some_weights(), strict=True):
                assert tensor.dtype == dtype
                assert torch.equal(tensor, sent.to(dtype))
        sender.close()


def test_chunks_stay_small_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_chunks, "CHUNK_BYTES", 100)
    chunks = [
        [name for name, _ in open_chunk(chunk)]
        for chunk in InProcessSender(torch.float32).chunks(some_weights())
    ]
    # 60 + 20 + 4 bytes fit into the first, and the 1,792 bytes of the last get their own
    assert chunks == [["a.weight", "a.bias", "b.scale"], ["c.weight"]]


def test_another_process_reads_the_shared_file_and_nothing_is_left(tmp_path: Path) -> None:
    sender = SharedMemorySender(torch.float32, str(tmp_path))
    (chunk,) = sender.chunks(some_weights())
    output = subprocess.run(
        [sys.executable, "-c", READER], input=chunk, capture_output=True, check=True
    ).stdout.decode()
    expected = [
        f"{name} torch.float32 {list(tensor.shape)} {tensor.double().sum().item()}"
        for name, tensor in some_weights()
    ]
    assert output.splitlines() == expected
    assert not any(tmp_path.iterdir()), "the file has no name"


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """What a full disk does to a file, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    sender = SharedMemorySender(torch.float32, str(tmp_path))
    with largest_file(1024), pytest.raises(EngineError, match=r"transfer_folder"):
        sender.chunks(some_weights())
    (chunk,) = sender.chunks(some_weights())
    assert torch.equal(open_chunk(chunk)[0][1], some_weights()[0][1]), "it works once there is room"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    sender = SharedMemorySender(torch.float32, os.fspath(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match="nowhere"):
        sender.chunks(some_weights())
