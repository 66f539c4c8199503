"""[rollout.vllm]: how vLLM is run."""

from typing import Literal

from pydantic import Field, model_validator

from trustbatch.utils.tables import Changeable, Table


class VllmConfig(Table):
    """[rollout.vllm]: how vLLM is run; requires `rollout.engine = "vllm"`."""

    mode: Literal["server", "in_process"] = "server"
    """"server" is a process of its own"""
    devices: str | None = None
    """CUDA_VISIBLE_DEVICES of the server, e.g. "1" or "2,3"; default: this process's"""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one copy of the model"""
    gpu_memory_utilization: float = Field(default=0.4, gt=0.0, le=1.0)
    """share of the GPU's memory (of the machine's on a CPU) that vLLM takes"""
    kv_cache_gib: float | None = Field(default=None, gt=0.0)
    """size of the KV cache; default: what gpu_memory_utilization leaves for it"""
    weight_transfer: Literal["auto", "in_process", "ipc", "shared_memory"] = "auto"
    """how new weights reach vLLM"""
    transfer_folder: Changeable[str] = "/dev/shm"
    """where shared_memory puts them"""
    adapters: Literal["merged", "alone"] = "merged"
    """with LoRA: whether an update is the whole model, or adapters beside frozen weights"""
    enforce_eager: bool = False
    """no CUDA graphs: a faster start and slower decoding"""
    max_model_len: int | None = Field(default=None, ge=2)
    """longest prompt and completion together; default: the model's context"""
    sleep: bool = False
    """release the GPU's memory while the policy is trained"""
    start_seconds: Changeable[float] = Field(default=900.0, gt=0.0)
    generate_seconds: Changeable[float] = Field(default=3600.0, gt=0.0)
    update_seconds: Changeable[float] = Field(default=300.0, gt=0.0)

    @model_validator(mode="after")
    def _check(self) -> "VllmConfig":
        if self.mode == "in_process":
            if self.tensor_parallel > 1 or self.devices is not None:
                raise ValueError(
                    'rollout.vllm.tensor_parallel and rollout.vllm.devices require mode = "server"'
                )
            if self.weight_transfer in ("ipc", "shared_memory"):
                raise ValueError(
                    f'rollout.vllm.weight_transfer = "{self.weight_transfer}" is between two '
                    'processes: set it to "in_process", or set mode = "server"'
                )
        elif self.weight_transfer == "in_process":
            raise ValueError(
                'rollout.vllm.weight_transfer = "in_process" requires mode = "in_process": set '
                'that, or set weight_transfer to "ipc" or "shared_memory"'
            )
        return self
