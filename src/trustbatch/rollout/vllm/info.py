"""What the vLLM engine declares about itself; importing this does not import vLLM."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from trustbatch.errors import ConfigError
from trustbatch.rollout.engine import EngineInfo, EngineSettings, RolloutEngine

if TYPE_CHECKING:
    from trustbatch.models.policy import Policy


class VllmInfo(EngineInfo):
    """vLLM, in a process of its own or in the trainer's, with a copy of the weights."""

    name = "vllm"
    label = "vLLM"
    config_table = "vllm"
    sleep_key = "rollout.vllm.sleep"
    gpus_key = "rollout.vllm.tensor_parallel"

    def build(self, policy: "Policy", settings: EngineSettings) -> RolloutEngine:
        """Start vLLM; it divides requests into batches itself, so prompts_per_call is not used."""
        if settings.kv_precision != "auto":
            raise ConfigError(
                f'rollout.kv_precision = "{settings.kv_precision}" is not available with vLLM: '
                'remove it, or set rollout.engine = "native".'
            )
        from trustbatch.rollout.vllm.engine import VllmEngine

        return VllmEngine(
            policy,
            settings.table,
            seed=settings.seed,
            version=settings.version,
            precision=settings.precision,
            max_sequences=settings.max_sequences,
            top_logprobs=settings.top_logprobs,
            logprob_mode=settings.logprob_mode,
            anchor_temperature=settings.anchor_temperature,
            trust_remote_code=settings.trust_remote_code,
            device=settings.device,
            log_folder=settings.log_folder,
        )

    def require(self) -> None:
        """Raise ConfigError if vLLM is not installed."""
        if find_spec("vllm") is None:
            raise ConfigError(
                'rollout.engine = "vllm" needs vLLM, which is not installed: run '
                "pip install 'trustbatch[vllm]', or choose another engine."
            )

    def loads_adapters(self, table: Any) -> bool:
        """Whether rollout.vllm.adapters is "alone"."""
        return table.adapters == "alone"

    def check_ranks(self, table: Any, num_ranks: int) -> None:
        """Raise ConfigError for an engine in the process of one of several ranks."""
        if table.adapters == "alone" and num_ranks > 1:
            raise ConfigError(
                'rollout.vllm.adapters = "alone" is for one training process, and torchrun started '
                f'{num_ranks}: set it to "merged", or add [cluster].'
            )
        if table.mode == "in_process" and num_ranks > 1:
            raise ConfigError(
                'rollout.vllm.mode = "in_process" is for one process, and torchrun started '
                f'{num_ranks}: set it to "server".'
            )

    def weight_dtype(self, precision: str) -> torch.dtype:
        """Return the dtype of vLLM's weights; FP8 is quantized from bfloat16 values."""
        return getattr(torch, "bfloat16" if precision == "fp8" else precision)

    def num_gpus(self, table: Any) -> int:
        """Return the tensor-parallel size."""
        return table.tensor_parallel

    def reserved_bytes(self, table: Any, gpu_memory: float) -> float:
        """Return vLLM's fraction of the GPU, unless it has GPUs of its own."""
        return table.gpu_memory_utilization * gpu_memory if table.devices is None else 0.0

    def sleeps(self, table: Any) -> bool:
        """Whether rollout.vllm.sleep is set."""
        return table.sleep


INFO = VllmInfo()
