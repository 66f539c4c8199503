"""Which of how many training processes this is; one of one where there is no process group."""

import torch.distributed as dist


def this_rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if _is_distributed() else 0


def num_ranks() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if _is_distributed() else 1


def from_rank_zero(text: str | None) -> str | None:
    """Return what rank 0 gave; a collective, so every rank has to call it."""
    box = [text]
    if _is_distributed():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
