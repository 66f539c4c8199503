"""How good a model is, with confidence intervals and significance tests.

`statistics`, `results` and `comparison` need no torch. `suite`, `settings`, `sampling` and `folder`
get and store samples; `run` is `trustbatch eval`, `in_training` evaluates during a run, and
`evaluate` returns a mean reward.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trustbatch.evaluation.mean_reward import EvaluationResult, evaluate

__all__ = ["EvaluationResult", "evaluate"]


def __getattr__(name: str) -> Any:
    # lazy: results can be read and compared without torch, which takes seconds to import
    if name in __all__:
        from trustbatch.evaluation import mean_reward

        return getattr(mean_reward, name)
    raise AttributeError(f"module 'trustbatch.evaluation' has no attribute {name!r}")
