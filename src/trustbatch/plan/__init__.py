"""Memory plans: estimates by phase and part before a run, and advice if memory is short."""

from trustbatch.plan.describe import describe_plan
from trustbatch.plan.estimate import Estimator, estimate_memory
from trustbatch.plan.memory import Lora, MemoryPlan, Part, Phase, Setting

__all__ = [
    "Estimator",
    "Lora",
    "MemoryPlan",
    "Part",
    "Phase",
    "Setting",
    "describe_plan",
    "estimate_memory",
]
