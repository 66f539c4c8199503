"""How good a model is, and how sure one can be of it.

`pass_at_k`, `intervals`, `scores` and `comparison` are the statistics, and need no torch. `suite`,
`sample` and `folder` get the samples; `run` is `trustbatch eval`, and `in_training` the same within
a run.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trustbatch.evaluation.mean_reward import EvaluationResult, evaluate

__all__ = ["EvaluationResult", "evaluate"]


def __getattr__(name: str) -> Any:
    # results can be read and compared without torch, which takes seconds to import
    if name in __all__:
        from trustbatch.evaluation import mean_reward

        return getattr(mean_reward, name)
    raise AttributeError(f"module 'trustbatch.evaluation' has no attribute {name!r}")
