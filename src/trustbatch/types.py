"""The nouns that travel through the package, in the order in which they come to be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # graders run in processes that have no use for torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem to be answered, e.g. Prompt(id="7", text="12+34=", answer="46")."""

    id: str
    """names the sample: two different samples of one problem have different ids"""
    text: str
    answer: str
    task: str = ""
    """name of the task that it is from: a mixture has several"""
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """what a grader needs beside the answer; plain values, as in JSON"""
    system: str = ""
    """the system message, if there is one"""
    chat: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """arguments of the tokenizer's chat template, such as enable_thinking"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled from logits, applied in this order: temperature, top-k, top-p."""

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    """0 takes the most likely token"""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token"""
    top_logprobs: int = 0
    """how many of the most likely tokens are recorded with their log-probs at each position"""
    logprob_mode: str = "processed"
    """"processed" records the distribution sampled from; "raw" the untempered, untruncated one"""
    anchor_temperature: float | None = None
    """the objective pulls to softmax(logits / this), whatever is sampled from; None: it does not"""

    @property
    def records_anchor(self) -> bool:
        """Whether the anchor is another distribution than the recorded one, and so recorded too."""
        if self.anchor_temperature is None:
            return False
        if self.logprob_mode == "raw":
            return self.anchor_temperature != 1.0
        is_cut = self.top_p < 1.0 or self.top_k > 0
        return is_cut or self.anchor_temperature != self.temperature

    @property
    def of_any_length(self) -> SamplingParams:
        """The same for all that differ in `max_tokens` alone, and so can be sampled together."""
        return replace(self, max_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What an engine is asked: so many samples that continue one tokenized prompt."""

    prompt_id: str
    token_ids: tuple[int, ...]
    num_samples: int
    sampling: SamplingParams
    first_sample: int = 0
    """index of the first sample; the others follow it"""
    group: int = 0
    """number of the prompt in the run: whose turn it is where several policies answer"""
    turn: int = 0
    """number of the policy's turn in an episode; each has random numbers of its own"""
    policy: str | None = None
    """name of the policy that took the turns before and goes on; None: as the shares say"""

    @property
    def samples(self) -> range:
        """Indices of the samples to sample."""
        return range(self.first_sample, self.first_sample + self.num_samples)


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """a stop token was sampled; it is the completion's last token"""
    LENGTH = "length"
    """there was no room for another token: max_tokens, those of an environment included"""
    TURNS = "turns"
    """the last turn allowed was taken, and the environment would have gone on"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Who sampled a completion's tokens, and how."""

    policy: str
    version: int
    """that sampled the first token; `Completion.versions` has those after it"""
    engine: str
    precision: str
    temperature: float
    top_p: float
    top_k: int
    logprob_mode: str


class Role(StrEnum):
    """Who speaks in a turn."""

    POLICY = "policy"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one side said before the other, e.g. Turn(role=Role.ENVIRONMENT, text="higher")."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer of n tokens, with the probability that each had when it was sampled.

    In an episode of several turns the environment's tokens lie between the policy's: they are
    context, as a prompt is, and no part of what is recorded, counted or trained on.
    """

    prompt_id: str
    sample: int
    token_ids: Tensor
    """[n] int64"""
    behavior_logp: Tensor
    """[n] float32, of the distribution that `provenance.logprob_mode` names"""
    top_token_ids: Tensor | None
    """[n, K] int64, the K most likely tokens at each position"""
    behavior_top_logp: Tensor | None
    """[n, K] float32, their log-probs"""
    anchor_logp: Tensor | None = None
    """[n] float32, before temperature, top-k and top-p; None: the same as `behavior_logp`"""
    anchor_top_logp: Tensor | None = None
    """[n, K] float32, likewise of the K tokens"""
    finish_reason: FinishReason
    provenance: Provenance
    text: str
    """what the policy said; in an episode, in its last turn"""
    sampled: Tensor | None = None
    """[n] bool, False for the environment's tokens; None: the policy sampled all of them"""
    turns: tuple[Turn, ...] = ()
    """an episode's, the policy's first and last; none where the task does not answer"""
    versions: Tensor | None = None
    """[n] int32, which version sampled each token, where they differ; None: `provenance.version`"""

    @property
    def num_sampled(self) -> int:
        """How many of the tokens are the policy's."""
        return len(self.token_ids) if self.sampled is None else int(self.sampled.sum())

    def of_policy(self, values: Tensor) -> Tensor:
        """Return the entries of a tensor [n, ...] that belong to the policy's own tokens."""
        return values if self.sampled is None else values[self.sampled]

    @property
    def version_of_token(self) -> Tensor:
        """[num_sampled] integer: which version sampled each of the policy's own tokens."""
        if self.versions is not None:
            return self.of_policy(self.versions)
        return self.token_ids.new_full((self.num_sampled,), self.provenance.version)

    @property
    def all_versions(self) -> list[int]:
        """The versions that sampled it, the oldest first."""
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
    """it was cut for want of room, and `reward.truncated` leaves such completions out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What a grader said of one completion."""

    reward: float
    """not a number where the status is another than GRADED: what was not judged has no reward"""
    status: GradeStatus = GradeStatus.GRADED
    reason: str = ""
    """why it was not graded"""
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    """the terms that the reward is a weighted sum of, by name"""

    @classmethod
    def failed(cls, status: GradeStatus, reason: str) -> Grade:
        """Return the grade of a completion that could not be graded."""
        return cls(reward=math.nan, status=status, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All completions of one prompt: the unit over which rewards are compared."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    grades: tuple[Grade, ...] = ()
    """one a completion, once they are graded"""


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
    """One completion, ready to be trained on."""

    prompt_token_ids: tuple[int, ...]
    completion: Completion
    advantage: float

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_token_ids) + len(self.completion.token_ids)
