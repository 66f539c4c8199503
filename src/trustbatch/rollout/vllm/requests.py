"""What passes between the vLLM engine and the process that hosts vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trustbatch.types import FinishReason, SamplingParams
from trustbatch.weight_sync.weight_chunks import Chunk

GOODBYE = "goodbye"
"""the last call to a server"""
SERVER_PID = "TRUSTBATCH_VLLM_SERVER"
"""environment variable by which vLLM's own processes know the server that they belong to"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """How vLLM is started; the weights come later, as an update like any other."""

    separate_core: bool
    """schedule and compute in a process of their own, beside the one that handles results"""
    folder: str
    """has the model's config.json, and takes what vLLM needs to write"""
    dtype_name: str
    quantization: str | None
    logprob_mode: str
    top_logprobs: int
    """most tokens beside the sampled one that a request has log-probs of"""
    anchor_temperature: float | None
    """report log-probs of softmax(logits / this) too; None: only those sampled from"""
    max_model_len: int
    max_sequences: int
    tensor_parallel: int
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    enforce_eager: bool
    sleep: bool
    trust_remote_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One completion to be sampled."""

    token_ids: tuple[int, ...]
    seed: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """One sampled completion of n tokens, in plain arrays: tensors would travel as file handles."""

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
    """vLLM, in this process or in another; every call raises EngineError where it can't be done."""

    def generate(self, requests: Sequence[SampleRequest], seconds: float) -> list[SampleResult]:
        """Sample all completions, in the order of the requests, within so many seconds."""
        ...

    def begin_update(self) -> None:
        """Get ready for new weights; from here to `finish_update` there is no valid model."""
        ...

    def update(self, chunk: Chunk) -> None:
        """Take over some of the weights."""
        ...

    def finish_update(self) -> None:
        """Make the new weights the ones that are sampled from, and forget what the old computed."""
        ...

    def sleep(self) -> None:
        """Give back the GPU's memory."""
        ...

    def wake(self) -> None:
        """Take the memory again."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return facts for logs and reports, such as vLLM's version."""
        ...

    def close(self) -> None:
        """End vLLM."""
        ...
