"""[evaluation]: how the policy is evaluated while it is trained."""

from pydantic import Field, model_validator

from trustbatch.tasks.config import SuiteTaskConfig
from trustbatch.utils.tables import Changeable, Table


class EvaluationConfig(Table):
    """[evaluation]: how the policy is evaluated while it is trained, which changes nothing."""

    every: Changeable[int] = Field(default=0, ge=0)
    """steps between evaluations, also before the first step and after the last; 0 is never"""
    suite: Changeable[tuple[SuiteTaskConfig, ...]] = ()
    """tasks by name, files, or tables such as {name = "arithmetic", level = 1}"""
    data: Changeable[str | None] = None
    """folder with NAME.jsonl.gz of each named task"""
    limit: Changeable[int | None] = Field(default=None, ge=1)
    """first problems of each task; default: all"""
    prompts: Changeable[int] = Field(default=256, ge=1)
    """problems of a task without an end"""
    samples: Changeable[int] = Field(default=4, ge=1)
    """per problem"""
    temperature: Changeable[float] = Field(default=1.0, ge=0.01, le=100.0)
    top_p: Changeable[float] = Field(default=0.95, gt=0.0, le=1.0)
    max_tokens: Changeable[int | None] = Field(default=None, ge=1)
    """longest completion; default: rollout.max_tokens"""

    @model_validator(mode="after")
    def _check(self) -> "EvaluationConfig":
        if self.every and not self.suite:
            raise ValueError(
                'evaluation.suite is empty: name tasks such as ["math500"], or remove '
                "evaluation.every"
            )
        if self.suite and not self.every:
            raise ValueError(
                "evaluation.every is not set, so evaluation.suite is never used: set it to a "
                "number of steps"
            )
        return self
