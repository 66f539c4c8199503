"""The vLLM engine: samples completions with vLLM, in this process or in one of its own.

vLLM starts with an empty model of the policy's shape. All weights, also the first ones, are loaded
through its weight-transfer API in the engine's precision, so that version 0 is loaded like every
later one, whether the model came from the hub, a folder or a checkpoint.
"""

import copy
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trustbatch.errors import ConfigError, EngineError
from trustbatch.models.lora import Adapters
from trustbatch.models.policy import Policy
from trustbatch.rollout.sampling import sample_key
from trustbatch.rollout.vllm.client import VllmClient
from trustbatch.rollout.vllm.config import VllmConfig
from trustbatch.rollout.vllm.info import INFO
from trustbatch.rollout.vllm.requests import Host, HostSettings, SampleRequest, SampleResult
from trustbatch.types import Completion, GenerationRequest, Provenance, SamplingParams
from trustbatch.weight_sync.weight_chunks import (
    ChunkSender,
    InProcessSender,
    IpcSender,
    SharedMemorySender,
)

GIB = 2**30
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""of adapters that vLLM has room for"""
SEED_BITS = 2**63 - 1
"""vLLM's seeds are not negative"""


class VllmEngine:
    """Samples from vLLM, which has a copy of the policy's weights, one version at a time."""

    def __init__(
        self,
        policy: Policy,
        config: VllmConfig,
        *,
        seed: int,
        version: int = 0,
        precision: str = "auto",
        max_sequences: int = 512,
        top_logprobs: int = 0,
        logprob_mode: str = "processed",
        anchor_temperature: float | None = None,
        trust_remote_code: bool = False,
        device: torch.device | None = None,
        log_folder: Path | None = None,
    ) -> None:
        """Start vLLM, with the weights of the policy.

        With an `anchor_temperature` it can record the policy's log-probs at that temperature beside
        those of the sampling distribution. `device` is where vLLM computes (default: the policy's).
        The log of its process is in `log_folder` until it ends in order, or stays there.
        """
        INFO.require()
        self.policy = policy
        self.on_gpu = (device or policy.device).type == "cuda"
        self.config = config
        self.seed = seed
        self.precision = policy.precision if precision == "auto" else precision
        self.dtype = INFO.weight_dtype(self.precision)
        self.logprob_mode = logprob_mode
        self.anchor_temperature = anchor_temperature
        self.trust_remote_code = trust_remote_code
        self._log_folder = log_folder
        self.max_model_len = min(
            config.max_model_len or policy.context_length, policy.context_length
        )
        self._refuse_impossible()
        self._host: Host | None = None
        self._trouble = "has not loaded any weights"
        self._is_asleep = False
        self._sender = self._build_sender()
        self._folder = tempfile.TemporaryDirectory(
            prefix="trustbatch-vllm-", ignore_cleanup_errors=True
        )
        try:
            self._host = self._start(max_sequences, top_logprobs)
            if self._adapters is not None:
                self._load_chunks(self._adapters.frozen_weights(), version)
            self.load_weights(policy.named_weights(), version)
        except BaseException:
            self.close()
            raise

    @property
    def _adapters(self) -> Adapters | None:
        """The adapters that are loaded alone; None if weights have them, or there are none."""
        adapters = self.policy.adapters
        return adapters if adapters is not None and adapters.published_alone else None

    @property
    def version(self) -> int:
        """Version of the weights that the next completions are sampled from."""
        return self._version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return all completions; those of a prompt share its entries of vLLM's prefix cache."""
        host = self._healthy_host()
        if self._is_asleep:
            raise EngineError("vLLM is asleep and can't sample completions: call wake() before.")
        for request in requests:
            self._refuse_unfit(request)
        slots = [(request, sample) for request in requests for sample in request.samples]
        samples = [self._sample_request(request, sample) for request, sample in slots]
        results = host.generate(samples, self.config.generate_seconds)
        texts = self.policy.decode([torch.from_numpy(result.token_ids) for result in results])
        return [
            self._completion(request, sample, result, text)
            for (request, sample), result, text in zip(slots, results, texts, strict=True)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the policy's parameters into vLLM; the version changes once all are loaded."""
        if self._adapters is None:
            self._load_chunks(weights, version)
        else:
            folder = Path(self._folder.name) / "adapters"
            self._adapters.save(folder, dict(weights))
            self._trouble = f"has not loaded the adapters of version {version}"
            self._running_host().load_adapters(str(folder))
            self._trouble = ""
        self._version = version

    def _load_chunks(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        host = self._running_host()
        # pack first: if that fails for lack of space, the old version stays in use
        chunks = self._sender.chunks(weights)
        self._trouble = f"holds only a part of version {version}"
        host.begin_update()
        for chunk in chunks:
            host.update(chunk)
        host.finish_update()
        self._trouble = ""

    def sleep(self) -> None:
        """Free the GPU memory if `rollout.vllm.sleep` is set."""
        if self.config.sleep and not self._is_asleep:
            self._healthy_host().sleep()
            self._is_asleep = True

    def wake(self) -> None:
        """Allocate the memory again."""
        if self._is_asleep:
            self._healthy_host().wake()
            self._is_asleep = False

    def close(self) -> None:
        """End vLLM and remove its files."""
        if self._host is not None:
            self._host.close()
            self._host = None
        self._sender.close()
        self._folder.cleanup()

    def _start(self, max_sequences: int, top_logprobs: int) -> Host:
        config = self.config
        self._save_model_config()
        settings = HostSettings(
            # on a CPU it would compete for the cores; with several workers vLLM has one anyway
            separate_core=config.mode == "server" and (self.on_gpu or config.tensor_parallel > 1),
            folder=self._folder.name,
            dtype_name=str(self.dtype).removeprefix("torch."),
            quantization="fp8" if self.precision == "fp8" else None,
            logprob_mode=self.logprob_mode,
            top_logprobs=self._num_top(top_logprobs),
            anchor_temperature=self.anchor_temperature,
            max_model_len=self.max_model_len,
            max_sequences=max_sequences,
            tensor_parallel=config.tensor_parallel,
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_bytes=None if config.kv_cache_gib is None else int(config.kv_cache_gib * GIB),
            enforce_eager=config.enforce_eager,
            sleep=config.sleep,
            trust_remote_code=self.trust_remote_code,
            lora_rank=None if self._adapters is None else self._vllm_rank(self._adapters),
        )
        if config.mode == "server":
            return VllmClient(
                settings,
                devices=config.devices,
                log_folder=self._log_folder,
                start_seconds=config.start_seconds,
                update_seconds=config.update_seconds,
            )
        # imported here, so that the client of a server never loads vLLM
        from trustbatch.rollout.vllm.host import VllmHost

        return VllmHost(settings)

    @staticmethod
    def _vllm_rank(adapters: Adapters) -> int:
        rank = adapters.peft_config.r
        if rank > RANKS[-1]:
            raise ConfigError(
                f"vLLM has adapters of rank {RANKS[-1]} at most, and model.lora.rank is {rank}: "
                'lower it, or set rollout.vllm.adapters to "merged".'
            )
        return next(each for each in RANKS if each >= rank)

    def _save_model_config(self) -> None:
        """Write the config.json that vLLM builds the model from, with its architecture."""
        model_config = copy.deepcopy(self.policy.model.config)
        model_config.architectures = [type(self.policy.model).__name__]
        model_config.save_pretrained(self._folder.name)

    def _build_sender(self) -> ChunkSender:
        if self.weight_transfer == "in_process":
            return InProcessSender(self.dtype)
        if self.weight_transfer == "ipc":
            return IpcSender(self.dtype)
        return SharedMemorySender(self.dtype, self.config.transfer_folder)

    @property
    def weight_transfer(self) -> str:
        """How weights reach vLLM; "auto" is the fastest way that works."""
        if self.config.weight_transfer != "auto":
            return self.config.weight_transfer
        if self.config.mode == "in_process":
            return "in_process"
        sees_trainer = self.policy.device.type == "cuda" and self.config.devices is None
        return "ipc" if sees_trainer else "shared_memory"

    def _healthy_host(self) -> Host:
        if self._trouble:
            raise EngineError(f"vLLM {self._trouble}, so it can't be used: start the run again.")
        return self._running_host()

    def _running_host(self) -> Host:
        if self._host is None:
            raise EngineError("vLLM is closed, so it can't be used: start the run again.")
        return self._host

    def _refuse_impossible(self) -> None:
        if self.precision == "fp8" and not self.on_gpu:
            raise ConfigError(
                'rollout.precision = "fp8" needs a GPU in vLLM: remove it, or set '
                'rollout.engine = "native", which emulates it on a CPU.'
            )
        if self.weight_transfer == "ipc" and self.policy.device.type == "cpu":
            raise ConfigError(
                'rollout.vllm.weight_transfer = "ipc" needs a policy on a GPU: set it to '
                '"shared_memory".'
            )

    @property
    def _can_be_raised(self) -> bool:
        return self.max_model_len < self.policy.context_length

    def _refuse_unfit(self, request: GenerationRequest) -> None:
        """Reject what vLLM would truncate, or return with other log-probs than requested."""
        num_tokens = len(request.token_ids) + request.sampling.max_tokens
        if num_tokens > self.max_model_len:
            raise EngineError(
                f"Prompt {request.prompt_id!r} has {len(request.token_ids)} tokens, which with "
                f"max_tokens = {request.sampling.max_tokens} is more than the engine's context of "
                f"{self.max_model_len}: lower max_tokens"
                + (", raise rollout.vllm.max_model_len," if self._can_be_raised else "")
                + " or leave out long prompts."
            )
        wanted = request.sampling.anchor_temperature if request.sampling.records_anchor else None
        if wanted not in (None, self.anchor_temperature):
            raise EngineError(
                f"The request wants the model's log-probs at T = {wanted:g} beside those sampled "
                "from, for which vLLM was not started: start VllmEngine with anchor_temperature = "
                f"{wanted:g}."
            )
        if request.sampling.logprob_mode != self.logprob_mode:
            raise EngineError(
                f"vLLM was started for {self.logprob_mode} log-probs, but the request wants "
                f"{request.sampling.logprob_mode} ones: set rollout.logprob_mode."
            )

    def _sample_request(self, request: GenerationRequest, sample: int) -> SampleRequest:
        key = sample_key(self.seed, self._version, request.prompt_id, sample, request.turn)
        num_top = self._num_top(request.sampling.top_logprobs)
        return SampleRequest(
            token_ids=request.token_ids,
            seed=key & SEED_BITS,
            sampling=replace(request.sampling, top_logprobs=num_top),
        )

    def _num_top(self, top_logprobs: int) -> int:
        """Return `top_logprobs`, at most the size of the vocabulary."""
        return min(top_logprobs, self.policy.model.config.get_text_config().vocab_size)

    def _completion(
        self, request: GenerationRequest, sample: int, result: SampleResult, text: str
    ) -> Completion:
        sampling = request.sampling
        logp, top_logp = torch.from_numpy(result.logp), torch.from_numpy(result.top_logp)
        if sampling.temperature == 0 and sampling.logprob_mode == "processed":
            # vLLM reports the distribution at temperature 1; the one sampled from has one token
            logp = torch.zeros_like(logp)
            top_logp = torch.full_like(top_logp, -torch.inf)
            top_logp[:, :1] = 0.0
        has_top = sampling.top_logprobs > 0
        anchor_logp, anchor_top_logp = None, None
        if sampling.records_anchor:
            assert result.anchor_logp is not None
            assert result.anchor_top_logp is not None
            anchor_logp = torch.from_numpy(result.anchor_logp)
            anchor_top_logp = torch.from_numpy(result.anchor_top_logp) if has_top else None
        return Completion(
            prompt_id=request.prompt_id,
            sample=sample,
            token_ids=torch.from_numpy(result.token_ids),
            behavior_logp=logp,
            top_token_ids=torch.from_numpy(result.top_token_ids) if has_top else None,
            behavior_top_logp=top_logp if has_top else None,
            anchor_logp=anchor_logp,
            anchor_top_logp=anchor_top_logp,
            finish_reason=result.finish_reason,
            provenance=self._provenance(sampling),
            text=text,
        )

    def _provenance(self, sampling: SamplingParams) -> Provenance:
        return Provenance(
            policy=self.policy.name,
            version=self._version,
            engine=INFO.name,
            precision=self.precision,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprob_mode=sampling.logprob_mode,
        )
