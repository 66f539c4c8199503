"""Settings of torch's CUDA memory allocator."""

import os

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""environment variables that configure the allocator: the new name, and the deprecated one"""


def enable_expandable_segments() -> None:
    """Let all tensor sizes share one memory range, unless the user has configured the allocator.

    Generation and training alternate with tensors of very different sizes: in separate segments,
    the memory that one leaves free cannot be used by the other. The setting takes effect only
    before the first use of the GPU. vLLM cannot use it, since it shares memory with other
    processes.
    """
    if not any(name in os.environ for name in VARIABLES):
        os.environ[VARIABLES[0]] = "expandable_segments:True"
