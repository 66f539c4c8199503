"""Tensors on disk in pieces: each rank writes what it holds, any placement is read back.

The files are those of torch.distributed.checkpoint's Hugging Face storage: safetensors, with the
place of each piece in the header. Its planner says what a rank holds, and its reader gives any rank
what it asks for. Its writer is not used: it builds each file in memory under the interpreter lock,
so the training beside it would stand still, and it needs collective calls.
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


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor, copied to host memory."""

    name: str
    offsets: tuple[int, ...]
    """where the piece begins in the whole tensor"""
    tensor: Tensor


@dataclass(frozen=True)
class StoredTensor:
    """What a folder says of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def copy_pieces(tensors: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> list[Piece]:
    """Copy to host memory what this rank has to write of plain and of distributed tensors.

    The copies lie in `buffers`, which the next call uses again: getting fresh memory from the
    system takes longer than the copying.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    pieces = []
    for item in planner.create_local_plan().items:
        whole, place = tensors[item.index.fqn], item.tensor_data
        assert place is not None
        # fewer rows than ranks leave some ranks with nothing
        is_empty = place.chunk.sizes.numel() == 0 and whole.numel() > 0
        if _is_ours(whole) and not is_empty:
            local = planner.resolve_data(item)
            assert isinstance(local, Tensor)
            if not is_plain(local):
                local = local.dequantize()  # quantized optimizer states
            name, buffer = item.index.fqn, buffers.get(item.index.fqn)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffers[name] = torch.empty(local.shape, dtype=local.dtype, device="cpu")
            copy = buffers[name].copy_(local.detach())
            pieces.append(Piece(name, tuple(place.chunk.offsets), copy))
    return pieces


def write_pieces(pieces: Sequence[Piece], folder: Path, *, max_bytes: int) -> Iterator[Path]:
    """Write this rank's files, each of at most `max_bytes` or one tensor; yields those written."""
    prefix = f"rank-{this_rank() + 1:05d}-of-{num_ranks():05d}"
    parts = chunks_by_size(pieces, size_of=lambda piece: piece.tensor.nbytes, max_size=max_bytes)
    for number, part in enumerate(parts, start=1):
        path = folder / f"{prefix}-part-{number:05d}.safetensors"
        places = {piece.name: {"saved_offsets": piece.offsets} for piece in part}
        save_file(
            {piece.name: piece.tensor for piece in part},
            path,
            metadata={
                "format": "pt",
                "DCP_VERSION": "1.0",
                "DCP_SHARDING_INFO": json.dumps(places),
            },
        )
        yield path


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the whole tensors whose pieces are in a folder."""
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: StoredTensor(tuple(entry.size), entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in stored.items()
    }


def read_into(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill tensors, plain or distributed in any way, in place; no rank waits for another."""
    targets = dict(tensors)
    reader = HuggingFaceStorageReader(str(folder))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor, or what a distributed one consists of, is made of ordinary numbers."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return type(local) in (Tensor, Parameter)


def _is_ours(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that hold the same piece."""
    if not isinstance(tensor, DTensor):
        return this_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(
        number
        for number, placement in zip(coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )
