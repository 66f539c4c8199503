"""Weights in chunks: as tensors in one process, through shared memory, or by CUDA IPC.

A sender turns named tensors into chunks of handles, and `open_chunk` turns a chunk back into
tensors, in the same process or in another one on the same machine.
"""

import errno
import math
import os
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from trustbatch.errors import EngineError
from trustbatch.utils.chunks import chunks_by_size

CHUNK_BYTES = 2**30
"""converted to the engine's precision at a time, beside the trainer's own copy"""
ALIGNMENT = 64
DEVICE_ARGUMENT = 6
"""position of the device's index among the arguments of `rebuild_cuda_tensor`"""


@dataclass(frozen=True, slots=True)
class SharedSlice:
    """A tensor in a file that both processes map."""

    path: str
    offset: int
    file_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view_in(self, file: Tensor) -> Tensor:
        """Return this part of the mapped file."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return file[self.offset : self.offset + num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """A tensor in the memory of a GPU that both processes see."""

    gpu_uuid: str
    arguments: tuple[Any, ...]
    """of `rebuild_cuda_tensor`"""


@dataclass(frozen=True, slots=True)
class TensorHandle:
    """One named tensor of a chunk."""

    name: str
    content: Tensor | SharedSlice | CudaHandle


Chunk = list[TensorHandle] | bytes
"""handles; pickled if they leave the process, whatever sends them"""


class ChunkSender(Protocol):
    """Packs weights in the engine's precision."""

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Chunk]:
        """Yield chunks; each is valid until the next one is requested."""
        ...

    def close(self) -> None:
        """Free what the sender holds."""
        ...


class InProcessSender:
    """Passes tensors within one process."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Chunk]:
        """Yield converted tensors; those that already have the right dtype are not copied."""
        for chunk in _converted_chunks(weights, self.dtype):
            yield [TensorHandle(name, tensor) for name, tensor in chunk]

    def close(self) -> None:
        """Do nothing: nothing is held."""


class IpcSender:
    """Shares tensors in GPU memory with another process: only handles are sent."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Chunk]:
        """Yield handles; their memory stays valid until the next chunk is requested."""
        for chunk in _converted_chunks(weights, self.dtype):
            # the reader does not see this process's stream: finish writing first
            torch.cuda.synchronize()
            yield pickle.dumps([TensorHandle(name, _handle(tensor)) for name, tensor in chunk])
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Do nothing: nothing is held."""


class SharedMemorySender:
    """Writes all weights into an unnamed file that the other process maps.

    The file never has a name, so that nothing is left behind however this process ends.
    """

    def __init__(self, dtype: torch.dtype, folder: str) -> None:
        self.dtype = dtype
        self.folder = folder
        self._file: int | None = None

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Chunk]:
        """Return one chunk with all weights; a full disk raises before the update begins."""
        tensors = list(weights)
        offsets = [0]
        for _, tensor in tensors:
            num_bytes = tensor.numel() * self.dtype.itemsize
            offsets.append(offsets[-1] + -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        path = self._reserve(offsets[-1])
        file = _map_file(path, offsets[-1])
        handles = []
        for (name, tensor), offset in zip(tensors, offsets[:-1], strict=True):
            part = SharedSlice(path, offset, offsets[-1], self.dtype, tuple(tensor.shape))
            part.view_in(file).copy_(tensor)
            handles.append(TensorHandle(name, part))
        return iter([pickle.dumps(handles)])

    def close(self) -> None:
        """Free the memory once no process maps it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _reserve(self, num_bytes: int) -> str:
        """Allocate the file, since writing to the mapping of a full disk crashes the process."""
        try:
            if self._file is None:
                self._file = os.open(self.folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise EngineError(
                    f"New weights can't be written to {self.folder} ({error.strerror}): set "
                    "rollout.vllm.transfer_folder to another folder."
                ) from error
            raise EngineError(
                f"The {num_bytes / 2**20:.0f} MiB of new weights do not fit into {self.folder} "
                f"({error.strerror}): free space there (for /dev/shm in a container: --shm-size), "
                "or set rollout.vllm.transfer_folder to another folder."
            ) from error
        return f"/proc/{os.getpid()}/fd/{self._file}"


def open_chunk(chunk: Chunk) -> list[tuple[str, Tensor]]:
    """Return the named tensors; those in shared memory are not copied."""
    handles: list[TensorHandle] = pickle.loads(chunk) if isinstance(chunk, bytes) else chunk
    files: dict[str, Tensor] = {}

    def opened(content: Tensor | SharedSlice | CudaHandle) -> Tensor:
        if isinstance(content, SharedSlice):
            if content.path not in files:
                files[content.path] = _map_file(content.path, content.file_bytes)
            return content.view_in(files[content.path])
        if isinstance(content, CudaHandle):
            arguments = list(content.arguments)
            arguments[DEVICE_ARGUMENT] = _device_of(content.gpu_uuid)
            # the sender reuses this memory, but a layer is loaded once all its parts have arrived
            return rebuild_cuda_tensor(*arguments).clone()
        return content

    return [(handle.name, opened(handle.content)) for handle in handles]


def _map_file(path: str, num_bytes: int) -> Tensor:
    """Return the file's content as bytes."""
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def _handle(tensor: Tensor) -> CudaHandle:
    _, arguments = reduce_tensor(tensor)
    return CudaHandle(str(torch.cuda.get_device_properties(tensor.device).uuid), arguments)


def _device_of(gpu_uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == gpu_uuid:
            return index
    raise EngineError(
        'rollout.vllm.weight_transfer = "ipc" needs an engine that sees the trainer\'s GPU: remove '
        'rollout.vllm.devices, or set the transfer to "shared_memory".'
    )


def _converted_chunks(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield chunks of at most CHUNK_BYTES, or one larger tensor, in the given dtype."""
    converted = ((name, tensor.to(dtype).contiguous()) for name, tensor in weights)
    return chunks_by_size(converted, size_of=lambda pair: pair[1].nbytes, max_size=CHUNK_BYTES)
