"""Sharded tensors on disk: each rank writes its shards, and any sharding can be read back.

The format is that of torch.distributed.checkpoint's Hugging Face storage: safetensors, with the
offsets of each shard in the header. Its planner lists the shards of a rank, and its reader gives
each rank the shards that it requests. Its writer is not used: it builds each file in memory while
holding the interpreter lock, which would stop the training, and it needs collective calls.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from trustbatch.utils.chunks import chunks_by_size
from trustbatch.utils.distributed import num_ranks, this_rank
from trustbatch.utils.files import apply_umask


@dataclass(frozen=True)
class Shard:
    """One rank's shard of a tensor, copied to host memory."""

    name: str
    offsets: tuple[int, ...]
    """of the shard in the whole tensor"""
    tensor: Tensor


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of a whole tensor in a folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def copy_shards(tensors: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> list[Shard]:
    """Copy the shards that this rank has to write, of plain or distributed tensors, to host memory.

    The copies are kept in `buffers`, which the next call reuses: allocating new memory takes longer
    than the copy.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    shards = []
    for item in planner.create_local_plan().items:
        whole, placed = tensors[item.index.fqn], item.tensor_data
        assert placed is not None
        # with fewer rows than ranks, some ranks have no shard
        is_empty = placed.chunk.sizes.numel() == 0 and whole.numel() > 0
        if _writes(whole) and not is_empty:
            local = planner.resolve_data(item)
            assert isinstance(local, Tensor)
            if not is_plain(local):
                local = local.dequantize()  # quantized optimizer states
            name, buffer = item.index.fqn, buffers.get(item.index.fqn)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffers[name] = torch.empty(local.shape, dtype=local.dtype, device="cpu")
            copy = buffers[name].copy_(local.detach())
            shards.append(Shard(name, tuple(placed.chunk.offsets), copy))
    return shards


def write_shards(shards: Sequence[Shard], folder: Path, *, max_bytes: int) -> Iterator[Path]:
    """Write this rank's files, of at most `max_bytes` or one tensor each; yields their paths."""
    prefix = f"rank-{this_rank() + 1:05d}-of-{num_ranks():05d}"
    parts = chunks_by_size(shards, size_of=lambda shard: shard.tensor.nbytes, max_size=max_bytes)
    for number, part in enumerate(parts, start=1):
        path = folder / f"{prefix}-part-{number:05d}.safetensors"
        offsets = {shard.name: {"saved_offsets": shard.offsets} for shard in part}
        save_file(
            {shard.name: shard.tensor for shard in part},
            path,
            metadata={
                "format": "pt",
                "DCP_VERSION": "1.0",
                "DCP_SHARDING_INFO": json.dumps(offsets),
            },
        )
        apply_umask(path)
        yield path


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the whole tensors whose shards are in a folder."""
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: StoredTensor(tuple(entry.size), entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in stored.items()
    }


def read_into(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill plain or distributed tensors in place; not collective."""
    targets = dict(tensors)
    reader = HuggingFaceStorageReader(str(folder))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor, or the local shard of a distributed one, is not quantized."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return type(local) in (Tensor, Parameter)


def _writes(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that hold the same shard."""
    if not isinstance(tensor, DTensor):
        return this_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(
        number
        for number, placement in zip(coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )
