"""What training keeps in host memory instead of a GPU's: AdamW's moments, and inputs of layers.

Both are computed on the device as without it, so the results are the same bit for bit. Moments are
read and written once in an optimizer step, a part at a time. The input of a recomputed layer is
written while the next layers run, and read back while those behind it are recomputed.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

PART = 2**26
"""numbers of a parameter that are updated at a time"""
MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_WRITING = 2
"""inputs that stay on the device until they are written; more would only wait"""


class HostAdamW(torch.optim.AdamW):
    """AdamW whose moments are in host memory, and visit the parameters' device for the update."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient."""
        assert closure is None, "the gradient is there before the step"
        devices = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
                    devices.add(parameter.device)
        for device in devices:
            if device.type == "cuda":  # whoever reads the moments may be a CPU
                torch.cuda.current_stream(device).synchronize()

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: _host_tensor(parameter).zero_() for name in MOMENTS}
        flat = (parameter, parameter.grad.contiguous(), *(state[name] for name in MOMENTS))
        for weights, gradient, *stored in zip(*(_parts(each) for each in flat), strict=True):
            first, second = (each.to(parameter.device, non_blocking=True) for each in stored)
            adamw(
                [weights],
                [gradient],
                [first],
                [second],
                [],
                [state["step"].clone()],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for host, moment in zip(stored, (first, second), strict=True):
                host.copy_(moment, non_blocking=True)
        state["step"] += 1


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.detach().view(-1).split(PART)


def _host_tensor(like: Tensor) -> Tensor:
    """Return an uninitialized tensor that a GPU can read and write beside its computations."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


class HostActivations(torch.autograd.graph.saved_tensors_hooks):
    """Keeps what autograd saves inside the context in host memory, until it is needed.

    Memory of the device is used again only after its content is written, and the order of the
    computations decides which tensor is read next: the one saved before.
    """

    def __init__(self) -> None:
        super().__init__(self._write, self._read)
        self._writing: deque[tuple[Tensor, torch.Event]] = deque()
        self._newest: weakref.ref[_Saved] | None = None
        self._stream: torch.cuda.Stream | None = None

    def _write(self, tensor: Tensor) -> "_Saved | Tensor":
        if tensor.numel() == 0:
            return tensor  # some versions of checkpoint save one beside the input, on the CPU
        saved = _Saved(_host_tensor(tensor), tensor.device, before=self._newest)
        self._newest = weakref.ref(saved)
        if not tensor.is_cuda:
            saved.host.copy_(tensor)
            return saved
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            saved.host.copy_(tensor.detach(), non_blocking=True)
            self._writing.append((tensor.detach(), self._stream.record_event()))
        self._release(MAX_WRITING)
        return saved

    def _release(self, num_left: int) -> None:
        """Give up the oldest tensors; later computations wait until they are written."""
        while len(self._writing) > num_left:
            tensor, written = self._writing.popleft()
            torch.cuda.current_stream(tensor.device).wait_event(written)

    def _read(self, saved: "_Saved | Tensor") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._release(0)
        tensor = saved.read(self._stream)
        previous = None if saved.before is None else saved.before()
        if previous is not None and not previous.was_read and self._stream is not None:
            previous.start_reading(self._stream)
        return tensor


class _Saved:
    """One tensor in host memory."""

    def __init__(
        self, host: Tensor, device: torch.device, *, before: "weakref.ref[_Saved] | None"
    ) -> None:
        self.host = host
        self.device = device
        self.before = before
        """what was saved before it, and is probably read after it"""
        self.was_read = False
        self._copy: tuple[Tensor, torch.Event] | None = None

    def start_reading(self, stream: torch.cuda.Stream) -> None:
        """Read it beside the computations that were started before."""
        copy = torch.empty_like(self.host, device=self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))  # its memory may be in use
        with torch.cuda.stream(stream):
            copy.copy_(self.host, non_blocking=True)
            self._copy = copy, stream.record_event()

    def read(self, stream: torch.cuda.Stream | None) -> Tensor:
        """Return it on its device."""
        self.was_read = True
        if stream is None:
            return self.host.to(self.device, copy=True)
        if self._copy is None:
            self.start_reading(stream)
        assert self._copy is not None
        (tensor, is_there), self._copy = self._copy, None
        torch.cuda.current_stream(self.device).wait_event(is_there)
        return tensor
