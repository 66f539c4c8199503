# pyright: reportMissingImports=false
# (types are checked without vLLM, which is optional and large)
"""vLLM in this process: start, generate, load weights, sleep."""

import gc
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

# read when vLLM is imported or started
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_HOST_IP"] = "127.0.0.1"
# only processes of this machine connect
os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
# it supports neither a seed per request nor processed log-probs
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# the trainer uses the same CPU cores
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import numpy as np
import torch
import vllm
from vllm import LLM
from vllm import SamplingParams as VllmSampling
from vllm.inputs import tokens_input
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor import multiproc_executor, uniproc_executor

from trustbatch.errors import EngineError
from trustbatch.rollout.vllm import backend as vllm_backend
from trustbatch.rollout.vllm.anchors import num_columns
from trustbatch.rollout.vllm.requests import HostSettings, SampleRequest, SampleResult
from trustbatch.types import FinishReason
from trustbatch.weight_sync.weight_chunks import Chunk

QUANTIZATION = {"fp8": "fp8_per_channel"}
"""e4m3 weights with a scale per output channel, activations with a scale per token"""

CPU_BATCH_TOKENS = 4096
"""vLLM's default for its CPU build"""


class VllmHost:
    """Runs vLLM's engine step by step, so that a deadline can end it."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._num_requests = 0
        self._has_sleep_mode = settings.sleep and not current_platform.is_cpu()
        self._asleep: set[str] = set()
        self._adapters: LoRARequest | None = None
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(settings.separate_core))
        if settings.anchor_temperature is not None:
            # its sampler can be extended; that of the second model runner changes with each version
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        _use_file_store(settings.folder)
        options: dict[str, Any] = {}
        if settings.quantization is not None:
            options["quantization"] = QUANTIZATION[settings.quantization]
        if current_platform.is_cpu():
            # chunked prefill rewinds the generator of a seed, which the CPU build can't do
            options["enable_chunked_prefill"] = False
            options["max_num_batched_tokens"] = max(settings.max_model_len, CPU_BATCH_TOKENS)
        if settings.lora_rank is not None:
            _refuse_without_adapters()
            options["enable_lora"] = True
            options["max_lora_rank"] = settings.lora_rank
        # vLLM seeds all generators of its process
        with torch.random.fork_rng():
            self._llm = LLM(
                model=settings.folder,
                # prompts are token ids and the engine decodes; weights are transferred later
                skip_tokenizer_init=True,
                load_format="dummy",
                weight_transfer_config={"backend": vllm_backend.BACKEND},
                worker_extension_cls=f"{vllm_backend.__name__}.WorkerExtension",
                dtype=settings.dtype_name,
                logprobs_mode=f"{settings.logprob_mode}_logprobs",
                max_logprobs=self._num_columns(settings.top_logprobs) - 1,
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_sequences,
                tensor_parallel_size=settings.tensor_parallel,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                kv_cache_memory_bytes=settings.kv_cache_bytes,
                enforce_eager=settings.enforce_eager,
                enable_sleep_mode=self._has_sleep_mode,
                enable_prefix_caching=True,
                generation_config="vllm",
                trust_remote_code=settings.trust_remote_code,
                **options,
            )
        self._record_anchor()

    def describe(self) -> dict[str, Any]:
        """Return facts for logs and reports."""
        config = self._llm.llm_engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "kv_cache_blocks": config.cache_config.num_gpu_blocks,
        }

    def generate(self, requests: Sequence[SampleRequest], seconds: float) -> list[SampleResult]:
        """Return all completions; those unfinished at the deadline are aborted."""
        engine = self._llm.llm_engine
        deadline = time.monotonic() + seconds
        places: dict[str, int] = {}
        for place, request in enumerate(requests):
            name = str(self._num_requests)
            self._num_requests += 1
            places[name] = place
            prompt = tokens_input(list(request.token_ids))
            sampling = self._vllm_sampling(request)
            engine.add_request(name, prompt, sampling, lora_request=self._adapters)
        results: dict[int, SampleResult] = {}
        try:
            while engine.has_unfinished_requests():
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"vLLM has finished {len(results)} of {len(requests)} completions within "
                        f"{seconds:g} seconds: raise rollout.vllm.generate_seconds, or lower "
                        "rollout.max_tokens."
                    )
                for output in engine.step():
                    if output.finished:
                        place = places.pop(output.request_id)
                        results[place] = self._result(output.outputs[0], requests[place])
        finally:
            if places:
                engine.abort_request(list(places))
        return [results[place] for place in range(len(requests))]

    def begin_update(self) -> None:
        """Prepare all layers, in memory that sleeping may have freed."""
        self._wake_weights()
        self._llm.start_weight_update()

    def update(self, chunk: Chunk) -> None:
        """Load some of the weights."""
        self._llm.update_weights({"update_info": {"chunk": chunk}})

    def finish_update(self) -> None:
        """Finish the layers, and drop the keys and values of the old weights."""
        self._llm.finish_weight_update()
        self._drop_cache()

    def load_adapters(self, folder: str) -> None:
        """Replace the adapters, and drop the keys and values of the old ones."""
        self._wake_weights()
        if not self._llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True)):
            raise EngineError(f"vLLM did not load the adapters in {folder}: see its log.")
        self._adapters = LoRARequest("policy", 1, folder)
        self._drop_cache()

    def _wake_weights(self) -> None:
        if "weights" in self._asleep:
            self._llm.wake_up(["weights"])
            self._asleep.remove("weights")

    def _drop_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineError(
                "vLLM could not drop the keys and values of the old weights, since a request still "
                "uses them: generate and update one after the other."
            )

    def sleep(self) -> None:
        """Move the weights to host memory and free the GPU's; on a CPU only drop the cache."""
        self._llm.reset_prefix_cache()
        if self._has_sleep_mode and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Allocate the memory that is still free."""
        if self._asleep:
            self._llm.wake_up(sorted(self._asleep))
            self._asleep = set()

    def close(self) -> None:
        """End vLLM's worker processes and free its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _record_anchor(self) -> None:
        temperature = self._settings.anchor_temperature
        if temperature is None:
            return
        if not all(self._llm.collective_rpc("record_anchor", args=(temperature,))):
            self.close()
            raise EngineError(
                f"vLLM {vllm.__version__} has a sampler that can't report the log-probs of the "
                'model beside those sampled from: set objective.anchor = "sampler" '
                '("proximal" with pact), or rollout.engine = "native".'
            )

    def _num_columns(self, top_logprobs: int) -> int:
        """Return how many log-probs vLLM reports at each position."""
        anchored = self._settings.anchor_temperature is not None
        return num_columns(top_logprobs) if anchored else 1 + top_logprobs

    def _vllm_sampling(self, request: SampleRequest) -> VllmSampling:
        sampling = request.sampling
        return VllmSampling(
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            # the stop tokens are all named above
            ignore_eos=True,
            seed=request.seed,
            logprobs=self._num_columns(sampling.top_logprobs) - 1,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _result(self, output: CompletionOutput, request: SampleRequest) -> SampleResult:
        """Split the log-probs: at each position the sampled token's, then those of the top K."""
        if output.finish_reason not in ("stop", "length"):
            raise EngineError(
                f"vLLM ended a completion with finish_reason {output.finish_reason!r}: see its log."
            )
        num_tokens, width = len(output.token_ids), 1 + request.sampling.top_logprobs
        num_distributions = self._num_columns(request.sampling.top_logprobs) // width
        logprobs: Any = output.logprobs
        token_ids = np.array(logprobs.token_ids, dtype=np.int64)
        token_ids = token_ids.reshape(num_tokens, width, num_distributions)[:, :, 0]
        values = np.array(logprobs.logprobs, dtype=np.float32).reshape(
            num_tokens, width, num_distributions
        )
        logp, anchor = values[:, :, 0], values[:, :, 1] if num_distributions == 2 else None
        return SampleResult(
            token_ids=token_ids[:, 0],
            logp=logp[:, 0],
            top_token_ids=token_ids[:, 1:],
            top_logp=logp[:, 1:],
            anchor_logp=None if anchor is None else anchor[:, 0],
            anchor_top_logp=None if anchor is None else anchor[:, 1:],
            finish_reason=FinishReason(output.finish_reason),
        )


def _refuse_without_adapters() -> None:
    """Refuse a vLLM that can't load weights beneath adapters, or adapters in place of others."""
    loads_weights = hasattr(BaseLayerWithLoRA, "load_weights")
    if not loads_weights or "load_inplace" not in LoRARequest.__struct_fields__:
        raise EngineError(
            f"vLLM {vllm.__version__} can't load adapters alone: set rollout.vllm.adapters = "
            '"merged", or install vLLM 0.32.'
        )


def _use_file_store(folder: str) -> None:
    """Connect vLLM's processes through a file instead of a port.

    The TCP store of 0.24 listens on every network interface; later versions use a file themselves.
    """

    def init_method(ip: str, port: int) -> str:
        return f"file://{folder}/meeting-{uuid.uuid4().hex}"

    for executor in (uniproc_executor, multiproc_executor):
        executor.get_distributed_init_method = init_method
