"""The data types of the package, in the order of the data flow: prompt to train sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # grader processes do not import torch
    from torch import Tensor


Message: TypeAlias = "dict[str, str]"
"""a message of a conversation, as chat templates read it: its role and its content"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem of a task, e.g. Prompt(id="7", text="12+34=", answer="46")."""

    id: str
    """unique within a run: random numbers depend on it, so a repeated problem has another id"""
    text: str
    answer: str
    task: str = ""
    """name of its task: a mixture has several"""
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """what a grader needs besides the answer; plain values, as in JSON"""
    system: str = ""
    """the system message, if there is one"""
    chat: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """arguments of the tokenizer's chat template, such as enable_thinking"""
    history: tuple[Message, ...] = field(default=(), hash=False)
    """earlier messages of a conversation, after the system message and before the text"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled from logits, applied in this order: temperature, top-k, top-p."""

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    """0: the most likely token"""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit"""
    top_logprobs: int = 0
    """number K of most likely tokens whose log-probs are recorded at each position"""
    logprob_mode: str = "processed"
    """"processed" records the distribution sampled from; "raw" the untempered, untruncated one"""
    anchor_temperature: float | None = None
    """the anchor of the objective is softmax(logits / this); None: the objective has none"""

    @property
    def records_anchor(self) -> bool:
        """Whether the anchor differs from the recorded distribution, and so is recorded too."""
        if self.anchor_temperature is None:
            return False
        if self.logprob_mode == "raw":
            return self.anchor_temperature != 1.0
        is_truncated = self.top_p < 1.0 or self.top_k > 0
        return is_truncated or self.anchor_temperature != self.temperature

    @property
    def of_any_length(self) -> SamplingParams:
        """The parameters without `max_tokens`: requests that agree in them can share a batch."""
        return replace(self, max_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request to an engine: `num_samples` completions of one tokenized prompt."""

    prompt_id: str
    token_ids: tuple[int, ...]
    num_samples: int
    sampling: SamplingParams
    first_sample: int = 0
    """index of the first sample; the others have the following indices"""
    group: int = 0
    """number of the prompt in the run: it decides which of several policies samples"""
    turn: int = 0
    """number of the policy's turn in an episode; random numbers depend on it"""
    policy: str | None = None
    """name of the policy that sampled the earlier turns; None: chosen by the shares"""

    @property
    def samples(self) -> range:
        """Indices of the requested samples."""
        return range(self.first_sample, self.first_sample + self.num_samples)


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """a stop token was sampled; it is the completion's last token"""
    LENGTH = "length"
    """`max_tokens` was reached, tokens of an environment included"""
    TURNS = "turns"
    """the maximum number of turns was reached before the environment ended the episode"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Which policy and engine sampled a completion, and with which settings."""

    policy: str
    version: int
    """of the policy when it sampled the first token; `Completion.versions` has the others"""
    engine: str
    precision: str
    temperature: float
    top_p: float
    top_k: int
    logprob_mode: str
    kv_precision: str = "auto"
    """of keys and values in the engine's cache; "auto" is that of its matrix products"""


class Role(StrEnum):
    """The author of a turn."""

    POLICY = "policy"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of an episode, e.g. Turn(role=Role.ENVIRONMENT, text="higher")."""

    role: Role
    text: str
    reward: float | None = None
    """of a turn of the policy, where the environment gives a reward after each"""

    def to_record(self) -> dict[str, Any]:
        """Return plain values, without a reward where there is none."""
        record: dict[str, Any] = {"role": str(self.role), "text": self.text}
        return record if self.reward is None else record | {"reward": self.reward}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion of n tokens, with the log-prob of each token when it was sampled.

    In an episode of several turns, the environment's tokens are between the policy's: they are
    context like the prompt, and are not recorded, counted or trained on.
    """

    prompt_id: str
    sample: int
    token_ids: Tensor
    """[n] int64"""
    behavior_logp: Tensor
    """[n] float32, under the distribution that `provenance.logprob_mode` names"""
    top_token_ids: Tensor | None
    """[n, K] int64, the K most likely tokens at each position"""
    behavior_top_logp: Tensor | None
    """[n, K] float32, their log-probs"""
    anchor_logp: Tensor | None = None
    """[n] float32, before temperature, top-k and top-p; None: the same as `behavior_logp`"""
    anchor_top_logp: Tensor | None = None
    """[n, K] float32, likewise for the K tokens"""
    finish_reason: FinishReason
    provenance: Provenance
    text: str
    """the decoded completion; in an episode, the policy's last turn"""
    sampled: Tensor | None = None
    """[n] bool, False for the environment's tokens; None: the policy sampled all tokens"""
    turns: tuple[Turn, ...] = ()
    """of an episode, the first and the last by the policy; empty without an environment"""
    versions: Tensor | None = None
    """[n] int32, the version that sampled each token; None: all `provenance.version`"""
    version_logp: Tensor | None = None
    """[n] float32, the trainer's own log-probs by the version that sampled the tokens, at its
    temperature and without truncation; measured for the ledger where rollouts wait"""
    failure: Grade | None = None
    """why its episode could not be played to its end, so that it has no reward"""

    @property
    def key(self) -> tuple[str, int]:
        """Its prompt's id and its number among the samples: unique within a step."""
        return self.prompt_id, self.sample

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return len(self.token_ids) if self.sampled is None else int(self.sampled.sum())

    def of_policy(self, values: Tensor) -> Tensor:
        """Return the entries of a tensor [n, ...] that belong to the policy's tokens."""
        return values if self.sampled is None else values[self.sampled]

    @property
    def version_of_token(self) -> Tensor:
        """[num_sampled] integer: the version that sampled each of the policy's tokens."""
        if self.versions is not None:
            return self.of_policy(self.versions)
        return self.token_ids.new_full((self.num_sampled,), self.provenance.version)

    @property
    def all_versions(self) -> list[int]:
        """The versions that sampled its tokens, oldest first."""
        if self.versions is None:
            return [self.provenance.version]
        return sorted(set(self.version_of_token.tolist()))


class GradeStatus(StrEnum):
    """How the grading of a completion ended."""

    GRADED = "graded"
    FAILED = "failed"
    """the grader raised an error, or returned something that is not a finite number"""
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    TRUNCATED = "truncated"
    """it was truncated, and `reward.truncated` excludes such completions"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The grade of one completion."""

    reward: float
    """NaN unless it was graded, or reward.ungraded is a number"""
    status: GradeStatus = GradeStatus.GRADED
    reason: str = ""
    """why it was not graded"""
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    """the terms of the reward, before their weights, by name"""

    @classmethod
    def failed(cls, status: GradeStatus, reason: str) -> Grade:
        """Return the grade of a completion that could not be graded."""
        return cls(reward=math.nan, status=status, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All completions of one prompt: the group in which rewards are compared."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    grades: tuple[Grade, ...] = ()
    """one per completion; empty before grading"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The graded groups that one step trains on."""

    groups: list[RolloutGroup]
    metrics: dict[str, float] = field(default_factory=dict)
    """how its generation went"""
    num_tokens: int = 0
    """tokens generated for it, also for groups that dynamic sampling left out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One completion with its prompt and advantage, ready for training."""

    prompt_token_ids: tuple[int, ...]
    completion: Completion
    advantage: float

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt_token_ids) + len(self.completion.token_ids)
