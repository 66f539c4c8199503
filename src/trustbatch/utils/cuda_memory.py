"""How torch asks a GPU for memory."""

import os

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def enable_expandable_segments() -> None:
    """Have one range of memory for all sizes, unless the user has chosen otherwise.

    Sampling completions and training take turns, with tensors of quite different sizes: in separate
    ranges, what one has left free is of no use to the other. It takes effect where the GPU has not
    been used yet. vLLM can't have it: it hands memory to other processes.
    """
    if not any(name in os.environ for name in VARIABLES):
        os.environ[VARIABLES[0]] = "expandable_segments:True"
