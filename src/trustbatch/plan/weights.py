"""Bytes of a model's weights: as the trainer holds them, and what an engine adds to that."""

from dataclasses import dataclass

import torch

from trustbatch.models.quantization.formats import bytes_per_weight
from trustbatch.plan.memory import BFLOAT16, FLOAT32, Setting
from trustbatch.plan.outline import ModelOutline


@dataclass(frozen=True)
class Weights:
    """One model under a setting. Products are those of the trainer; None is float32."""

    outline: ModelOutline
    setting: Setting
    products: torch.dtype | None
    engine_precision: str
    is_gpu: bool

    @property
    def trained(self) -> int:
        """Number of parameters that the optimizer updates."""
        lora = self.setting.lora
        if lora is None:
            return self.outline.num_parameters
        return self.outline.adapter_parameters(lora.rank, lora.targets)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of each frozen weight that is not quantized, norms left aside."""
        lora = self.setting.lora
        if lora is None or lora.base_precision == "float32":
            return FLOAT32
        is_rounded = lora.base_precision == "bfloat16" or self.products == torch.bfloat16
        return BFLOAT16 if is_rounded else FLOAT32

    @property
    def in_trainer(self) -> float:
        """Bytes of all parameters: frozen ones, and what is trained."""
        return self.frozen + FLOAT32 * self.trained

    @property
    def frozen(self) -> float:
        """Bytes of the parameters beside adapters; 0 without adapters."""
        outline = self.outline
        if self.setting.lora is None:
            return 0.0
        linears = self.frozen_bytes * outline.linear_weights
        if self.setting.quantization is not None:
            linears = sum(
                count * bytes_per_weight(self.setting.quantization, width)
                for width, count in outline.linear_weights_by_width.items()
            )
        others = outline.num_parameters - outline.linear_weights - outline.embedded_weights
        embedded = self.frozen_bytes * outline.embedded_weights
        return linears + embedded + FLOAT32 * others

    @property
    def in_engine(self) -> float:
        """Bytes of rounded or reordered copies for an engine on the trainer's parameters."""
        outline = self.outline
        if not outline.is_decoded_fast:
            return 0.0
        if not self.is_gpu:
            return FLOAT32 * outline.decoded_weights
        if self.setting.lora is not None:
            return self._beside_adapters()
        if self.engine_precision == "fp8":
            return outline.linear_weights + BFLOAT16 * outline.head_weights
        return BFLOAT16 * outline.decoded_weights if self.engine_precision == "bfloat16" else 0.0

    def _beside_adapters(self) -> float:
        """Bytes of what the engine has beside frozen weights: rounded adapters, and few copies."""
        outline = self.outline
        if self.engine_precision == "float32":
            return FLOAT32 * self.trained
        copies = BFLOAT16 * self.trained
        if self.engine_precision == "fp8":
            copies += outline.linear_weights
        elif self.frozen_bytes == FLOAT32 and self.setting.quantization is None:
            copies += BFLOAT16 * outline.linear_weights
        head = BFLOAT16 * outline.head_weights if self.frozen_bytes == FLOAT32 else 0.0
        return copies + head

    @property
    def dequantized(self) -> float:
        """Bytes of the quantized weight that a product has in its own type meanwhile."""
        if self.setting.quantization is None:
            return 0.0
        itemsize = FLOAT32 if self.products is None else BFLOAT16
        return itemsize * self.outline.largest_linear
