"""The data of a run: all problems of a finite task are checked before the first step."""

from collections.abc import Callable, Sequence

from trustbatch.config import Config
from trustbatch.errors import ConfigError
from trustbatch.evaluation.suite import EvaluatedTask
from trustbatch.tasks import Task, fit_task
from trustbatch.tasks.filters import refuse_bad
from trustbatch.tasks.rows import PromptChecks
from trustbatch.types import Prompt

CountTokens = Callable[[Sequence[Prompt]], Sequence[int | str]]


def checked_task(
    config: Config,
    task: Task,
    suite: Sequence[EvaluatedTask],
    *,
    count_tokens: CountTokens,
    context_length: int,
    say: Callable[[str], None],
) -> Task:
    """Return the task with those prompts that the run can use; the suite must be usable as it is.

    `count_tokens` returns the number of tokens of prompts, or why one can't be tokenized.
    """
    fitted = fit_task(
        task,
        PromptChecks(
            count_tokens=count_tokens,
            context_length=context_length,
            max_tokens=config.rollout.max_tokens,
            task_grades=config.reward.task_grades,
            needs_answers=config.reward.needs_answers,
            say=say,
        ),
    )
    checks = PromptChecks(
        count_tokens=count_tokens,
        context_length=context_length,
        max_tokens=config.evaluation.max_tokens or config.rollout.max_tokens,
        table="evaluation",
        say=say,
    )
    for each in suite:
        try:
            refuse_bad(each.problems, checks, each.task)
        except ValueError as error:
            raise ConfigError(f"{each.name!r} can't be evaluated on: {error}") from error
    return fitted
