"""The most memory that a GPU had in use, by torch's own count and by the device's."""

import threading

import torch

GIB = 2**30
SECONDS_BETWEEN = 0.05


class MemoryWatch:
    """Asks the device again and again in a thread; without a GPU there is nothing to tell.

    It does not ask before this process uses the GPU: torch's allocator is configured by then.
    What the device says holds for all processes and all libraries on it, CUDA's own context and
    memory that torch keeps for later included. It is what must be free for the run to fit.
    """

    def __init__(self) -> None:
        self._most_used = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if torch.cuda.is_available():
            self._thread.start()

    def restart(self) -> None:
        """Forget the peaks so far."""
        self._most_used = 0
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def peaks_gib(self) -> dict[str, float]:
        """Return the peaks since the last restart: device, torch_reserved, torch_allocated."""
        if not torch.cuda.is_initialized():
            return {}
        self._ask()
        return {
            "device": self._most_used / GIB,
            "torch_reserved": torch.cuda.max_memory_reserved() / GIB,
            "torch_allocated": torch.cuda.max_memory_allocated() / GIB,
        }

    def close(self) -> None:
        """Stop asking."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN):
            if torch.cuda.is_initialized():
                self._ask()

    def _ask(self) -> None:
        free, total = torch.cuda.mem_get_info()
        self._most_used = max(self._most_used, total - free)
