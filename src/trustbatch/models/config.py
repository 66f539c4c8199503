"""[model] and [model.lora]: what is trained."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trustbatch.errors import ConfigError
from trustbatch.utils.tables import Changeable, Table

ALL_LINEAR = "all-linear"


class LoraConfig(Table):
    """[model.lora]: train low-rank adapters beside the model's weights, which stay frozen."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0.0)
    """the output of an adapter is multiplied by alpha / rank"""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """names of the linear layers with an adapter; "all-linear" is all but the output head"""
    base_precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """in which the frozen weights are kept. "auto": that of matrix products"""

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

    def frozen_precision(self, products: str) -> str:
        """Return the precision of the frozen weights of a model with these products."""
        if self.base_precision == "auto":
            return products
        if self.base_precision == "bfloat16" and products != "bfloat16":
            raise ConfigError(
                'model.lora.base_precision = "bfloat16" needs matrix products in bfloat16, and '
                f"those of this run are in {products}: set model.precision to bfloat16, or "
                "remove the key."
            )
        return self.base_precision


class ModelConfig(Table):
    """[model]: what is trained."""

    name: str
    """a folder with a Hugging Face checkpoint, a .gguf file, "smollm2", or a name on the hub"""
    device: str = "auto"
    """"auto" is the GPU where there is one, else "cpu\""""
    gpu_memory_limit_gib: Changeable[float | None] = Field(default=None, gt=1.0)
    """of a GPU that this process may use, CUDA's own part included; default: all of it"""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """of matrix products; what is trained is always float32. "auto": bfloat16 on a GPU"""
    trust_remote_code: bool = False
    """run code that comes with the checkpoint"""
    quantization: Literal["nf4", "int8", "fp8"] | None = None
    """of the frozen weights beside adapters; a model published in one of these formats has it"""
    lora: LoraConfig | None = None
    """default: the whole model is trained"""

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.quantization is not None and self.lora is None:
            raise ValueError(
                f'model.quantization = "{self.quantization}" is for frozen weights beside '
                "adapters: add the table [model.lora], or remove the key"
            )
        return self
