"""Messages between the vLLM engine and the process that hosts vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trustbatch.types import FinishReason, SamplingParams
from trustbatch.weight_sync.weight_chunks import Chunk

GOODBYE = "goodbye"
"""the last message to a server"""
SERVER_PID = "TRUSTBATCH_VLLM_SERVER"
"""environment variable with the process id of the server that started vLLM's processes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """How vLLM is started; the weights are loaded later, as an update like any other."""

    separate_core: bool
    """run vLLM's engine core in a process of its own"""
    folder: str
    """contains the model's config.json, and files that vLLM writes"""
    dtype_name: str
    quantization: str | None
    logprob_mode: str
    top_logprobs: int
    """maximum of `SamplingParams.top_logprobs` in a request"""
    anchor_temperature: float | None
    """also report log-probs of softmax(logits / this); None: only those sampled from"""
    max_model_len: int
    max_sequences: int
    tensor_parallel: int
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    enforce_eager: bool
    sleep: bool
    trust_remote_code: bool
    lora_rank: int | None = None
    """of adapters that are loaded beside the weights; None: there are none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One completion to be sampled."""

    token_ids: tuple[int, ...]
    seed: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """One completion of n tokens, in numpy arrays: tensors would be sent as file handles."""

    token_ids: NDArray[np.int64]
    """[n]"""
    logp: NDArray[np.float32]
    """[n]"""
    top_token_ids: NDArray[np.int64]
    """[n, K]"""
    top_logp: NDArray[np.float32]
    """[n, K]"""
    anchor_logp: NDArray[np.float32] | None
    """[n], where vLLM was started to report it"""
    anchor_top_logp: NDArray[np.float32] | None
    """[n, K]"""
    finish_reason: FinishReason


class Host(Protocol):
    """vLLM, in this process or in another; every call raises EngineError on failure."""

    def generate(self, requests: Sequence[SampleRequest], seconds: float) -> list[SampleResult]:
        """Return all completions, in the order of the requests, within `seconds`."""
        ...

    def begin_update(self) -> None:
        """Get ready for new weights; from here to `finish_update` there is no valid model."""
        ...

    def update(self, chunk: Chunk) -> None:
        """Load some of the weights."""
        ...

    def finish_update(self) -> None:
        """Sample from the new weights from now on, and drop the old ones' keys and values."""
        ...

    def load_adapters(self, folder: str) -> None:
        """Sample from these adapters, in PEFT's format, beside the weights from now on."""
        ...

    def sleep(self) -> None:
        """Free the GPU memory."""
        ...

    def wake(self) -> None:
        """Allocate the memory again."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return facts for logs and reports, such as vLLM's version."""
        ...

    def close(self) -> None:
        """End vLLM."""
        ...
