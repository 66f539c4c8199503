"""The log of completions: which are logged, and one readable record for each, with its tokens.

docs/completions.md describes the record.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trustbatch.objectives.estimators import RatioMoments, effective_sample_size
from trustbatch.observe.config import RunConfig
from trustbatch.types import Completion, RolloutGroup

LOGP_DIGITS = 7
"""significant ones: as many as float32 has"""
OTHER_DIGITS = 4
Columns = Mapping[str, Tensor]
"""values [num_sampled] of a completion's tokens by name, as the trainer has recorded them"""


def logged_groups(groups: Sequence[RolloutGroup], run: RunConfig) -> list[RolloutGroup]:
    """Return the first groups, whole, until `run.rollouts_logged` completions are among them."""
    chosen: list[RolloutGroup] = []
    for group in groups:
        if sum(len(each.completions) for each in chosen) >= run.rollouts_logged:
            break
        chosen.append(group)
    return chosen


def with_tokens(groups: Sequence[RolloutGroup], run: RunConfig) -> list[Completion]:
    """Return the completions whose tokens are recorded: as many as `run.tokens_logged` allows."""
    chosen: list[Completion] = []
    room = run.tokens_logged
    for completion in (each for group in groups for each in group.completions):
        if len(completion.token_ids) <= room:
            room -= len(completion.token_ids)
            chosen.append(completion)
    return chosen


def readable_records(
    groups: Sequence[RolloutGroup],
    advantages: Tensor,
    *,
    step: int,
    columns: Mapping[tuple[str, int], Columns],
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """Return the records of the first groups of a batch with advantages [groups, samples]."""
    records = []
    for number, group in enumerate(groups):
        prompt = tokenizer.decode(list(group.prompt_token_ids), skip_special_tokens=False)
        for sample, completion in enumerate(group.completions):
            advantage = float(advantages[number, sample])
            record = readable_record(group, sample, step=step, advantage=advantage)
            record["model_prompt"] = prompt
            if completion.key in columns:
                record |= _token_lists(completion, columns[completion.key], tokenizer)
            records.append(record)
    return records


def readable_record(
    group: RolloutGroup, sample: int, *, step: int, advantage: float
) -> dict[str, Any]:
    """Return one completion with its reward and provenance."""
    completion, grade = group.completions[sample], group.grades[sample]
    num_sampled = completion.num_sampled
    behavior_logp = completion.of_policy(completion.behavior_logp)
    record = {
        "step": step,
        "prompt_id": group.prompt.id,
        "sample": sample,
        "prompt": group.prompt.text,
        "completion": completion.text,
        "answer": group.prompt.answer,
        "reward": _number(grade.reward),
        "advantage": _number(advantage),
        **({"parts": dict(grade.parts)} if grade.parts else {}),
        **({"ungraded": f"{grade.status}: {grade.reason}"} if grade.reason else {}),
        "finish_reason": str(completion.finish_reason),
        "tokens": num_sampled,
        "mean_behavior_logp": _number(float(behavior_logp.mean())),
        **asdict(completion.provenance),
    }
    if completion.versions is not None:
        record["tokens_by_version"] = Counter(completion.version_of_token.tolist())
    if completion.turns:
        record["environment_tokens"] = len(completion.token_ids) - num_sampled
        record["turns"] = [turn.to_record() for turn in completion.turns]
    return record


def _token_lists(
    completion: Completion, columns: Columns, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return lists with one entry per token; numbers are None for an environment's tokens."""
    token_ids = completion.token_ids.tolist()
    behavior = completion.behavior_logp
    anchor = behavior if completion.anchor_logp is None else completion.anchor_logp
    log_ratio = columns["ratio"].log()
    moments = RatioMoments.of(log_ratio[log_ratio.isfinite()])
    lists = {
        "one_minus_ess": _number(1.0 - float(effective_sample_size(moments))),
        "token": tokenizer.batch_decode([[each] for each in token_ids], skip_special_tokens=False),
        "token_id": token_ids,
        "behavior_logp": _spread(completion, completion.of_policy(behavior), LOGP_DIGITS),
        "anchor_logp": _spread(completion, completion.of_policy(anchor), LOGP_DIGITS),
    }
    for name, values in columns.items():
        digits = LOGP_DIGITS if name.endswith("logp") else OTHER_DIGITS
        lists[name] = _spread(completion, values, digits)
    if completion.versions is not None:
        lists["token_version"] = completion.versions.tolist()
    return lists


def _spread(completion: Completion, values: Tensor, digits: int) -> list[float | None]:
    """Give each of the policy's tokens its value, and the environment's tokens none."""
    rounded = iter([_number(float(f"{value:.{digits}g}")) for value in values.tolist()])
    if completion.sampled is None:
        return list(rounded)
    return [next(rounded) if is_sampled else None for is_sampled in completion.sampled.tolist()]


def _number(value: float) -> float | None:
    """Return None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None
