"""[model] and [model.lora]: what is trained."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trustbatch.utils.tables import Changeable, Table

ALL_LINEAR = "all-linear"


class LoraConfig(Table):
    """[model.lora]: train low-rank adapters beside the model's weights, which stay frozen."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0.0)
    """the output of an adapter is multiplied by alpha / rank"""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """names of the linear layers with an adapter; "all-linear" is all but the output head"""
    base_precision: Literal["float32", "bfloat16"] = "float32"
    """in which the frozen weights of those layers are kept"""

    @field_validator("targets", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> "LoraConfig":
        if not self.targets:
            raise ValueError(
                'model.lora.targets is empty: name layers such as "q_proj", or remove the key'
            )
        return self


class ModelConfig(Table):
    """[model]: what is trained."""

    name: str
    """a folder with a Hugging Face checkpoint, a .gguf file, "smollm2", or a name on the hub"""
    device: str = "auto"
    """"auto" is the GPU where there is one, else "cpu\""""
    gpu_memory_limit_gib: Changeable[float | None] = Field(default=None, gt=1.0)
    """of a GPU that this process may use, CUDA's own part included; default: all of it"""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """of matrix products; parameters are always float32. "auto": bfloat16 on a GPU"""
    trust_remote_code: bool = False
    """run code that comes with the checkpoint"""
    lora: LoraConfig | None = None
    """default: the whole model is trained"""
