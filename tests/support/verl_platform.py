"""The CPU as a platform of verl, by its own registry of platforms.

VERL_USE_EXTERNAL_MODULES=tests.support.verl_platform VERL_PLATFORM=cpu
"""

from types import SimpleNamespace

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*_: object) -> int:
    return 0


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformCUDA):
    """Enough to train; verl has platforms of accelerators alone."""

    device_name = "cpu"
    vendor_name = "cpu"
    # what verl reads of torch.cuda to report memory, of which there is none
    device_module = SimpleNamespace(
        memory_allocated=nothing,
        memory_reserved=nothing,
        max_memory_allocated=nothing,
        max_memory_reserved=nothing,
        mem_get_info=lambda: (0, 0),
        is_available=lambda: False,
        get_device_name=lambda: "CPU",
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:  # type: ignore[override]  # verl hands it to `to`
        return torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass
