"""Publications: versions of the weights that engines load when they need them.

How a version is stored and sent is chosen by `choose_transfer`: by "process_group"
(`group_publisher.py`), on "disk" (below), or in "shared_memory", the cluster's object store.
"""

import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file, save_file
from torch import Tensor

from trustbatch.errors import EngineError
from trustbatch.utils.files import apply_umask

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]
MAX_MEMORY_FRACTION = 0.2
"""of the first trainer's GPU that published versions may take with "auto\""""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The engine process that loads weights."""

    engine: str
    """id, unique in the run"""
    address: str
    """IP address by which the trainer reaches its machine"""


class Publication(Protocol):
    """The weights of one version; it can be sent to another process."""

    def tensors(self, endpoint: Endpoint) -> Weights:
        """Return the weights by name, for an engine; they may be shared, so do not modify them."""
        ...


class Publisher(Protocol):
    """Makes weights available to the engines."""

    def publish(self, weights: Weights, version: int) -> Publication:
        """Copy the weights; the originals may change afterwards."""
        ...

    def forget(self, publication: Any) -> None:
        """Free the memory of a version that will not be requested again."""
        ...

    def drop_engine(self, engine: str) -> None:
        """Cancel transfers to a dead engine, given by its id."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@dataclass(frozen=True)
class DiskPublication:
    """Weights in a file."""

    path: str

    def tensors(self, endpoint: Endpoint) -> Weights:
        """Read the file."""
        return load_file(self.path).items()


class DiskPublisher:
    """Writes weights into a folder that all machines see and that belongs to this run alone.

    The folder is not touched before the first version: until then, another process may turn out to
    be training the same run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_in_use = False

    def publish(self, weights: Weights, version: int) -> DiskPublication:
        """Write a file atomically."""
        final = self.folder / f"version-{version}.safetensors"
        partial = final.with_suffix(".part")
        try:
            if not self._is_in_use:
                shutil.rmtree(self.folder, ignore_errors=True)  # left by a killed process
                self._is_in_use = True
            self.folder.mkdir(parents=True, exist_ok=True)
            # copies, because safetensors can't store tied tensors, which share memory
            save_file({name: each.detach().cpu().clone() for name, each in weights}, partial)
            apply_umask(partial)
            partial.replace(final)
        except OSError as error:
            raise EngineError(
                f"New weights can't be written to {self.folder} ({error.strerror}): free space "
                "there, or set cluster.transfer_folder to another folder."
            ) from error
        return DiskPublication(str(final.absolute()))

    def forget(self, publication: DiskPublication) -> None:
        """Delete the file."""
        Path(publication.path).unlink(missing_ok=True)

    def drop_engine(self, engine: str) -> None:
        """Do nothing: files do not depend on their readers."""

    def close(self) -> None:
        """Delete the folder, unless nothing was written to it."""
        if self._is_in_use:
            shutil.rmtree(self.folder, ignore_errors=True)


def choose_transfer(
    method: str,
    *,
    has_gpus: bool,
    shares_only_gpu: bool,
    published_bytes: Callable[[], float],
    gpu_memory: float,
) -> str:
    """Return "process_group", "shared_memory" or "disk" for the value of cluster.weight_transfer.

    Args:
        method: the configured value; "auto" is by process group between GPUs with room for it.
        has_gpus: whether trainer and engines compute on GPUs.
        shares_only_gpu: whether all of them share a single GPU.
        published_bytes: returns what the published versions take on the first trainer's GPU.
        gpu_memory: bytes of that GPU.
    """
    if method in ("shared_memory", "disk"):
        return method
    if not has_gpus:
        return "process_group" if method == "process_group" else "shared_memory"
    if shares_only_gpu:
        if method == "process_group":
            logger.warning(
                "Engines and trainer share the only GPU, which NCCL does not support: weights go "
                'through shared memory; set cluster.weight_transfer to "auto".'
            )
        return "shared_memory"
    on_gpu = keeps_on_gpu(method, published_bytes(), gpu_memory=gpu_memory)
    return "process_group" if on_gpu else "shared_memory"


def keeps_on_gpu(method: str, num_bytes: float, *, gpu_memory: float) -> bool:
    """Whether published versions stay on the first trainer's GPU, for cluster.weight_transfer."""
    if method == "auto":
        return num_bytes <= MAX_MEMORY_FRACTION * gpu_memory
    return method == "process_group"
