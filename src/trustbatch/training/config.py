"""[training]: how the policy is updated."""

from typing import Literal

from pydantic import Field, model_validator

from trustbatch.utils.tables import Changeable, Table


class TrainingConfig(Table):
    """[training]: how the policy is updated. Defaults are the paper's."""

    steps: int = Field(default=100, ge=1)
    """batches of rollouts to train on"""
    passes: int = Field(default=1, ge=1)
    """passes over each batch of rollouts"""
    mini_batches: int = Field(default=1, ge=1)
    """optimizer steps in a pass"""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """tokens computed in one forward pass; changes memory, not the result"""
    share_prompts: bool = True
    """compute a prompt once for all its samples where that pays; changes speed, not the result"""
    gradient_checkpointing: Changeable[bool] = False
    """recompute each layer in the backward pass: less memory, a third more time"""
    compile: Changeable[bool] = False
    """compile the layers of the model"""
    cpu_offload: Changeable[bool] = False
    """keep parameters, gradients and optimizer state in host memory; with several ranks"""
    optimizer_offload: Changeable[bool] = False
    """keep the optimizer's moments in host memory; with one rank"""
    activation_offload: Changeable[bool] = False
    """keep the inputs of layers that are recomputed in host memory"""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """"adamw_8bit" keeps its moments in 8 bits"""
    learning_rate: float = Field(default=1e-5, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.01, ge=0.0)
    gradient_clip: float = Field(default=1.0, gt=0.0)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    policy_temperature: float | Literal["rollout"] = 1.0
    """the policy is softmax(logits / policy_temperature); "rollout" is rollout.temperature"""
    reference_model: str | None = None
    """frozen reference for objective.reference_kl_coef; default: the initial model"""

    @model_validator(mode="after")
    def _check(self) -> "TrainingConfig":
        if self.policy_temperature != "rollout" and not self.policy_temperature > 0:
            raise ValueError('training.policy_temperature must be above 0, or "rollout"')
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError("training.betas must be two numbers in [0, 1)")
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError(
                "training.activation_offload keeps the inputs of recomputed layers in host memory: "
                "set training.gradient_checkpointing = true too, or remove it"
            )
        if self.optimizer_offload and self.optimizer != "adamw":
            raise ValueError(
                "training.optimizer_offload keeps the moments of training.optimizer = "
                f'"adamw" in host memory, and it is "{self.optimizer}": change one of the two'
            )
        return self
