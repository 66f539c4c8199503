"""How weights travel to an engine: as the tensors themselves, through shared memory, or CUDA IPC.

A sender turns named tensors into chunks of parcels, and `open_parcels` turns a chunk back into
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

CHUNK_BYTES = 2**30
"""most that is converted to the engine's precision at a time, beside the trainer's own copy"""
ALIGNMENT = 64
DEVICE_ARGUMENT = 6
"""position of the device's index among the arguments of `rebuild_cuda_tensor`"""


@dataclass(frozen=True, slots=True)
class SharedSlice:
    """A tensor's place in a file that both processes map."""

    path: str
    offset: int
    file_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def within(self, whole: Tensor) -> Tensor:
        """Return this part of the mapped file."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return whole[self.offset : self.offset + num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """A tensor in the memory of a GPU that both processes see."""

    gpu_uuid: str
    arguments: tuple[Any, ...]
    """of `rebuild_cuda_tensor`"""


@dataclass(frozen=True, slots=True)
class TensorHandle:
    """One named tensor under way."""

    name: str
    content: Tensor | SharedSlice | CudaHandle


Chunk = list[TensorHandle] | bytes
"""some parcels; those that leave the process are pickled here, whatever carries them"""


class ParcelSender(Protocol):
    """Packs weights in the engine's precision."""

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Chunk]:
        """Yield parcels; a chunk may be forgotten once the engine has taken it."""
        ...

    def close(self) -> None:
        """Give back what the sender holds."""
        ...


class DirectSender:
    """Hands over tensors within one process."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Chunk]:
        """Yield converted tensors; those that already have the right type are not copied."""
        for chunk in _converted(weights, self.dtype):
            yield [TensorHandle(name, tensor) for name, tensor in chunk]

    def close(self) -> None:
        """Nothing is held."""


class IpcSender:
    """Shows tensors in GPU memory to another process: only handles travel."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Chunk]:
        """Yield handles; the memory behind them stays until the next chunk is asked for."""
        for chunk in _converted(weights, self.dtype):
            # the reader does not see this process's stream: finish writing first
            torch.cuda.synchronize()
            yield pickle.dumps([TensorHandle(name, _handle(tensor)) for name, tensor in chunk])
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Nothing is held."""


class SharedMemorySender:
    """Writes all weights into a nameless file that the other process maps.

    The file has no name from the start, so that nothing is left behind however this process ends.
    """

    def __init__(self, dtype: torch.dtype, folder: str) -> None:
        self.dtype = dtype
        self.folder = folder
        self._file: int | None = None

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Chunk]:
        """Return one chunk with everything; a full disk is found before the engine hears of it."""
        tensors = list(weights)
        offsets = [0]
        for _, tensor in tensors:
            num_bytes = tensor.numel() * self.dtype.itemsize
            offsets.append(offsets[-1] + -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        path = self._reserve(offsets[-1])
        whole = _map_file(path, offsets[-1])
        parcels = []
        for (name, tensor), offset in zip(tensors, offsets[:-1], strict=True):
            place = SharedSlice(path, offset, offsets[-1], self.dtype, tuple(tensor.shape))
            place.within(whole).copy_(tensor)
            parcels.append(TensorHandle(name, place))
        return iter([pickle.dumps(parcels)])

    def close(self) -> None:
        """Give the memory back once nobody maps it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _reserve(self, num_bytes: int) -> str:
        """Make sure that the file has room, since writing to a full disk's mapping is a crash."""
        try:
            if self._file is None:
                self._file = os.open(self.folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise EngineError(
                    f"New weights can't be put into {self.folder} ({error.strerror}): name another "
                    "folder as rollout.vllm.transfer_folder."
                ) from error
            raise EngineError(
                f"The {num_bytes / 2**20:.0f} MiB of new weights do not fit into {self.folder} "
                f"({error.strerror}): make room there (for /dev/shm in a container: --shm-size), "
                "or name another folder as rollout.vllm.transfer_folder."
            ) from error
        return f"/proc/{os.getpid()}/fd/{self._file}"


def open_parcels(chunk: Chunk) -> list[tuple[str, Tensor]]:
    """Return the named tensors; what lies in shared memory is not copied."""
    parcels: list[TensorHandle] = pickle.loads(chunk) if isinstance(chunk, bytes) else chunk
    files: dict[str, Tensor] = {}

    def opened(content: Tensor | SharedSlice | CudaHandle) -> Tensor:
        if isinstance(content, SharedSlice):
            if content.path not in files:
                files[content.path] = _map_file(content.path, content.file_bytes)
            return content.within(files[content.path])
        if isinstance(content, CudaHandle):
            arguments = list(content.arguments)
            arguments[DEVICE_ARGUMENT] = _device_of(content.gpu_uuid)
            # the sender reuses this memory, but a layer is loaded once all its parts are here
            return rebuild_cuda_tensor(*arguments).clone()
        return content

    return [(parcel.name, opened(parcel.content)) for parcel in parcels]


def _map_file(path: str, num_bytes: int) -> Tensor:
    """Return the whole file as bytes."""
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


def _converted(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield groups of at most CHUNK_BYTES, or one larger tensor, in the given type."""
    chunk: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        size = tensor.numel() * dtype.itemsize
        if chunk and num_bytes + size > CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append((name, tensor.to(dtype).contiguous()))
        num_bytes += size
    if chunk:
        yield chunk
