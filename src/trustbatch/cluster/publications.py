"""Publishing weights to engines: through Ray's object store, or as files that all machines see."""

import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trustbatch.errors import EngineError

Weights = Iterable[tuple[str, Tensor]]


class Publication(Protocol):
    """The weights of one version, wherever they lie; it can be sent to an actor."""

    def tensors(self) -> Weights:
        """Return the weights by name; what is shared is not copied, and must not be changed."""
        ...


class Publisher(Protocol):
    """Makes weights available to the engines."""

    def publish(self, weights: Weights, version: int) -> Publication:
        """Take a copy of the weights, which may change from now on."""
        ...

    def forget(self, publication: Any) -> None:
        """Give back the room of a version that nobody will ask for again."""
        ...

    def drop_engine(self, engine: str) -> None:
        """Leave nothing under way to an engine, by its actor's id, that is no more."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass(frozen=True)
class _SharedTensor:
    """A tensor as plain bytes, which the object store can show without copying."""

    content: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "_SharedTensor":
        # always a copy: numpy fixes the size of memory that FSDP wants to give back later
        plain = tensor.detach().to("cpu", copy=True).contiguous()
        return cls(plain.flatten().view(torch.uint8).numpy(), plain.dtype, tuple(plain.shape))

    def tensor(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it can't be written to, nor is it
            return torch.from_numpy(self.content).view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class SharedPublication:
    """Weights in Ray's object store: once on each machine, in shared memory."""

    reference: list[Any]
    """in a list, so that an engine that has this version already does not fetch it"""

    def tensors(self) -> Weights:
        """Map the weights."""
        stored: list[tuple[str, _SharedTensor]] = ray.get(self.reference[0])
        return ((name, each.tensor()) for name, each in stored)


class SharedMemoryPublisher:
    """Puts weights into Ray's object store, which forgets them when nobody refers to them."""

    def publish(self, weights: Weights, version: int) -> SharedPublication:
        """Copy the weights into shared memory."""
        return SharedPublication(
            [ray.put([(name, _SharedTensor.of(tensor)) for name, tensor in weights])]
        )

    def forget(self, publication: SharedPublication) -> None:
        """The store forgets it with its last reference."""

    def drop_engine(self, engine: str) -> None:
        """The store does not know who reads."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class DiskPublication:
    """Weights in a file."""

    path: str

    def tensors(self) -> Weights:
        """Read the file."""
        return load_file(self.path).items()


class DiskPublisher:
    """Writes weights into a folder that all machines see, and that is this run's alone.

    It is touched with the first version only: before that, another process may turn out to be
    training the same run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_in_use = False

    def publish(self, weights: Weights, version: int) -> DiskPublication:
        """Write a file, whole or not at all."""
        final = self.folder / f"version-{version}.safetensors"
        partial = final.with_suffix(".part")
        try:
            if not self._is_in_use:
                shutil.rmtree(self.folder, ignore_errors=True)  # of a start that was killed
                self._is_in_use = True
            self.folder.mkdir(parents=True, exist_ok=True)
            # a copy of each: tied tensors share memory, which the format does not know
            save_file({name: each.detach().cpu().clone() for name, each in weights}, partial)
            partial.replace(final)
        except OSError as error:
            raise EngineError(
                f"New weights can't be put into {self.folder} ({error.strerror}): make room there, "
                "or name another folder as cluster.transfer_folder."
            ) from error
        return DiskPublication(str(final.absolute()))

    def forget(self, publication: DiskPublication) -> None:
        """Delete the file."""
        Path(publication.path).unlink(missing_ok=True)

    def drop_engine(self, engine: str) -> None:
        """Files do not know who reads them."""

    def close(self) -> None:
        """Delete the folder, unless nothing was put there."""
        if self._is_in_use:
            shutil.rmtree(self.folder, ignore_errors=True)
