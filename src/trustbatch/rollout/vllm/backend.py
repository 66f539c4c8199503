# pyright: reportMissingImports=false
# (types are checked without vLLM, which is optional and large)
"""The receiving end of weight updates inside vLLM: a backend of its weight-transfer API.

vLLM's own IPC backend needs Ray (0.24) and its NCCL backend a second GPU; neither runs on a CPU.
This one loads weight chunks, however they are sent, and works with vLLM 0.24 to 0.32, whose
backend interfaces differ. vLLM reloads layer by layer in both: quantized layers are quantized again
from the values received, and the tensors that CUDA graphs refer to stay in place.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from trustbatch.rollout.vllm.anchors import AnchoredSampler
from trustbatch.rollout.vllm.requests import SERVER_PID
from trustbatch.utils.processes import end_with
from trustbatch.weight_sync.weight_chunks import Chunk, open_chunk

BACKEND = "trustbatch"


@dataclass
class ChunkInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: a chunk says how it is sent."""


@dataclass
class ChunkUpdateInfo(WeightTransferUpdateInfo):
    """One chunk of an update."""

    chunk: Chunk


class ChunkTransferEngine(WeightTransferEngine[ChunkInitInfo, ChunkUpdateInfo]):
    """Loads the chunks of an update into this worker's model."""

    init_info_cls = ChunkInitInfo
    update_info_cls = ChunkUpdateInfo

    def init_transfer_engine(self, init_info: ChunkInitInfo) -> None:
        """Do nothing: there is nothing to set up."""

    def receive_weights(self, update_info: ChunkUpdateInfo, load_weights: Any = None) -> None:
        """Load a chunk; vLLM 0.24 passes the loader, later versions leave it to the backend."""
        weights: list[tuple[str, Tensor]] = open_chunk(update_info.chunk)
        (load_weights or self.model.load_weights)(weights)
        if torch.accelerator.is_available():
            # the sender may reuse its memory as soon as this returns
            torch.accelerator.synchronize()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one chunk (0.25 and later)."""
        self.receive_weights(self.parse_update_info(update_info))

    def start_weight_update(self) -> None:
        """Prepare every layer for new values (0.25 and later; before, the worker does it)."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Process layers that wait for the end, such as attention (0.25 and later)."""
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            for layer in self.model.modules():
                if isinstance(layer, ParallelLMHead):
                    # a head that is tied to the embedding receives no weights, but keeps a packed
                    # copy of the old ones
                    layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Do nothing: nothing is held."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Part of the interface of 0.24 that this package does not use."""
        raise NotImplementedError


class WorkerExtension:
    """Mixed into vLLM's workers, so that every worker process imports this module."""

    def record_anchor(self: Any, temperature: float) -> bool:
        """Also report the anchor's log-probs; False if this vLLM has another sampler."""
        return AnchoredSampler.replace(self.model_runner.sampler, temperature)


WeightTransferEngineFactory.register_engine(BACKEND, ChunkTransferEngine)

if int(os.environ.get(SERVER_PID, os.getpid())) != os.getpid():
    # a process that vLLM started: it must not outlive the server
    end_with(int(os.environ[SERVER_PID]))
