"""Is there what torch.compile needs? Without, it fails in the middle of the first step."""

import torch

from trustbatch.errors import ConfigError


def refuse_missing_compiler(setting: str, instead: str, device: torch.device) -> None:
    """Say what to change where a setting compiles for a CPU and no C++ compiler is there."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        raise ConfigError(
            f"{setting} needs a C++ compiler on a CPU, and there is none: install g++, or set it "
            f"to {instead}."
        ) from error
