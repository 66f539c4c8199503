r"""The terms of a reward; their fields are the options of [[reward.terms]].

To add one, write a dataclass with `grade(sample)` and register it in `TERMS`. It is sent to the
grading processes, so it must be picklable and must not import torch.
"""

import inspect
import numbers
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar
from urllib.parse import urlsplit

from trustbatch.math_grading.extract import last_box
from trustbatch.math_grading.grade import grade_math
from trustbatch.math_grading.grade import prepare as prepare_math
from trustbatch.rewards.http_client import DeadlineExceeded, InvalidResponse, RewardServer
from trustbatch.tasks.base import grade_completion
from trustbatch.types import Grade, GradeStatus, Prompt, Turn
from trustbatch.utils.imports import check_object_path, load_object
from trustbatch.utils.options import check_options, find_entry
from trustbatch.utils.worker import MAX_REASON_LENGTH, Outcome

SECRET = re.compile(r"(^|[&;])[^=]*(key|token|secret|passw|signature)[^=]*=", re.IGNORECASE)
TOKEN = re.compile(r"[\x21-\x7e]+")
LARGEST_REWARD = 1e12
"""beyond it, a mean or a standard deviation over a batch would lose the other rewards"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The input of a term: one completion and its prompt."""

    prompt: Prompt
    completion: str
    num_tokens: int
    turns: tuple[Turn, ...] = ()
    """of an episode, if an environment replied"""
    is_truncated: bool = False
    """whether it ended at the token limit; an episode out of turns did not"""
    failure: Grade | None = None
    """why its episode could not be played to its end: no term sees it"""


class Term:
    """Grades one completion at a time, by default in a grading process."""

    @property
    def runs_in_process(self) -> bool:
        """Whether it is cheap, bounded and trusted, and so needs no grading process."""
        return False

    def prepare(self) -> None:
        """Import what is needed, before the time limit of the first completion starts."""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse unusable options; `max_tokens` is rollout.max_tokens."""

    def grade(self, sample: Sample) -> float:
        """Return the value of this term."""
        raise NotImplementedError


class BatchTerm:
    """Grades a whole batch at once."""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse unusable options; `max_tokens` is rollout.max_tokens."""


@dataclass(frozen=True, kw_only=True)
class TaskTerm(Term):
    """The task's own grader."""

    task: Any = None

    @property
    def runs_in_process(self) -> bool:
        """Whether the task sets `grades_in_process`."""
        return getattr(self.task, "grades_in_process", False)

    def prepare(self) -> None:
        """Prepare math grading, which most tasks use."""
        prepare_math()

    def grade(self, sample: Sample) -> float:
        """Return the reward of the task's grader."""
        return grade_completion(self.task, sample.prompt, sample.completion, sample.turns)


@dataclass(frozen=True, kw_only=True)
class MathTerm(Term):
    """1 if the final answer equals the prompt's; `grade_math` documents the options."""

    require_boxed: bool = False
    decimals: int | None = None
    tolerance: float = 0.0
    percent: bool = False
    require_unit: bool = False
    thinking: bool | None = None
    """the prompt opens <think>; default: task.thinking"""

    def prepare(self) -> None:
        """Import what hard answers need."""
        prepare_math()

    def grade(self, sample: Sample) -> float:
        """Compare with the prompt's answer."""
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        if self.thinking is None:
            options["thinking"] = sample.prompt.chat.get("enable_thinking") is True
        return grade_math(sample.completion, sample.prompt.answer, **options)


@dataclass(frozen=True, kw_only=True)
class FormatTerm(Term):
    r"""1 if the completion has the required format, otherwise 0."""

    boxed: bool = False
    r"""require a \boxed{...}, of which the last one is closed"""
    think: bool = False
    """require exactly one </think>, and at most one <think>, at the very beginning"""
    pattern: str | None = None
    """require a match of this regular expression; the dot matches newlines"""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse a term without requirements, or an invalid pattern."""
        if not self.boxed and not self.think and self.pattern is None:
            raise ValueError("format needs boxed = true, think = true or a pattern.")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"format.pattern is not a regular expression: {error}.") from error

    def grade(self, sample: Sample) -> float:
        """Return 1 if all requirements are met."""
        text = sample.completion
        if self.boxed:
            box = last_box(text)
            if box is None or box[1] is None:
                return 0.0
        if self.think:
            before, _, after = text.partition("</think>")
            opened = before.lstrip().removeprefix("<think>")
            if before == text or "</think>" in after or "<think>" in opened + after:
                return 0.0
        matches = self.pattern is None or re.search(self.pattern, text, re.DOTALL)
        return float(bool(matches))


@dataclass(frozen=True, kw_only=True)
class OverlongTerm(Term):
    """DAPO's soft penalty: 0 up to `max_tokens - buffer`, then linearly down to -1."""

    buffer: int
    max_tokens: int | None = None
    """default: rollout.max_tokens"""

    @property
    def runs_in_process(self) -> bool:
        """Always: it only counts tokens."""
        return True

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse a buffer that is longer than the longest completion."""
        longest = self.max_tokens if self.max_tokens is not None else max_tokens
        if longest is None:
            raise ValueError("overlong needs max_tokens.")
        if not 0 < self.buffer <= longest:
            raise ValueError(
                f"overlong.buffer = {self.buffer} must be from 1 to the {longest} tokens of the "
                "longest completion."
            )

    def grade(self, sample: Sample) -> float:
        """Return the penalty for the number of tokens."""
        assert self.max_tokens is not None
        free = self.max_tokens - self.buffer
        return -min(max((sample.num_tokens - free) / self.buffer, 0.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class FunctionTerm(Term):
    """A function f(prompt, completion, answer) -> float, with an optional `details` parameter."""

    arguments: ClassVar = ("prompt", "completion", "answer")

    path: str

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse a path that does not exist."""
        check_object_path(self.path)

    def prepare(self) -> None:
        """Import the function."""
        _load_function(self.path, *self.arguments)

    def grade(self, sample: Sample) -> float:
        """Call the function."""
        function = _load_function(self.path, *self.arguments)
        prompt = sample.prompt
        options = {"details": prompt.details} if _takes_details(function) else {}
        return function(prompt.text, sample.completion, prompt.answer, **options)


@dataclass(frozen=True, kw_only=True)
class BatchFunctionTerm(BatchTerm):
    """A function f(prompts, completions, answers) -> list[float] of a whole batch."""

    arguments: ClassVar = ("prompts", "completions", "answers")

    path: str
    time_limit: float = 60.0
    """seconds per batch"""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse a path that does not exist."""
        check_object_path(self.path)
        if not self.time_limit > 0:
            raise ValueError("batch_function.time_limit must be above 0.")

    def prepare(self) -> None:
        """Import the function."""
        _load_function(self.path, *self.arguments)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Call the function with the whole batch; runs in a grading process."""
        function = _load_function(self.path, *self.arguments)
        values = list(function(*_texts(samples).values()))
        if len(values) != len(samples):
            raise ValueError(f"it returned {len(values)} rewards for {len(samples)} completions")
        return [float(value) if is_finite(value) else None for value in values]


@dataclass(frozen=True, kw_only=True)
class HttpTerm(BatchTerm):
    """Rewards from an HTTP server; `http_client` describes requests and responses."""

    url: str
    """such as http://localhost:8000/score"""
    timeout: float = 60.0
    """seconds per request"""
    deadline: float = 300.0
    """seconds for all requests of a batch, including retries"""
    batch_size: int = 64
    """completions per request"""
    token_variable: str | None = None
    """environment variable with a token, sent as "Authorization: Bearer TOKEN\""""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse an invalid address, a non-positive limit or a missing token."""
        parts = urlsplit(self.url)
        if parts.username or parts.password or SECRET.search(parts.query):
            raise ValueError(
                "http.url contains what looks like a secret, which would be written to the run "
                "folder: remove it, and name an environment variable as http.token_variable."
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"http.url = {self.url!r} must start with http:// or https://.")
        try:
            _ = parts.port
        except ValueError:
            raise ValueError(
                f"http.url = {self.url!r} has a port that is not a number from 0 to 65535."
            ) from None
        if self.timeout <= 0 or self.deadline <= 0 or self.batch_size < 1:
            raise ValueError("http.timeout, http.deadline and http.batch_size must be above 0.")
        if self.token_variable is None:
            return
        if self.token_variable not in os.environ:
            raise ValueError(
                f"http.token_variable names {self.token_variable}, which is not set: export it."
            )
        if not TOKEN.fullmatch(os.environ[self.token_variable]):
            raise ValueError(
                f"http.token_variable names {self.token_variable}, whose value is empty or has a "
                "character that no HTTP header may have, such as a space or a line break: set it "
                "again."
            )

    def outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample; a failed request fails all samples in it."""
        outcomes: list[Outcome] = []
        end = time.monotonic() + self.deadline
        for start in range(0, len(samples), self.batch_size):
            outcomes += self._request(samples[start : start + self.batch_size], end)
        return outcomes

    def _request(self, samples: Sequence[Sample], end: float) -> list[Outcome]:
        server = RewardServer(self.url, self.timeout, self.token_variable)
        try:
            rewards = server.rewards(_texts(samples), end=end)
        except InvalidResponse as error:
            return [_failure(GradeStatus.FAILED, str(error))] * len(samples)
        except DeadlineExceeded as error:
            reason = f"{self.url} gave no rewards within {self.deadline:g} seconds: {error}"
            return [_failure(GradeStatus.TIMED_OUT, reason)] * len(samples)
        return [
            Outcome(GradeStatus.GRADED, float(reward))
            if is_finite(reward) and not isinstance(reward, bool)
            else Outcome(GradeStatus.FAILED, reason=f"{self.url} answered {reward!r} for it")
            for reward in rewards
        ]


def _failure(status: GradeStatus, reason: str) -> Outcome:
    return Outcome(status, reason=reason[:MAX_REASON_LENGTH])


def _texts(samples: Sequence[Sample]) -> dict[str, list[str]]:
    """Return the arguments of a batch function, which are also the body of a request."""
    return {
        "prompts": [sample.prompt.text for sample in samples],
        "completions": [sample.completion for sample in samples],
        "answers": [sample.prompt.answer for sample in samples],
    }


@lru_cache(maxsize=64)
def _load_function(path: str, *arguments: str) -> Callable[..., Any]:
    """Import a user's function; refuse one that can't be called with these arguments."""
    function = load_object(path, private=True)
    if not callable(function):
        raise ImportError(f"{path!r} is not a function, but {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have no signature
        return function
    optional = {"details": None} if "details" in signature.parameters else {}
    try:
        signature.bind(*arguments, **optional)
    except TypeError:
        raise TypeError(
            f"{path!r} must take ({', '.join(arguments)}), but it takes {signature}"
        ) from None
    return function


def _takes_details(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter for the details of a prompt."""
    try:
        return "details" in inspect.signature(function).parameters
    except ValueError:  # some built-in functions have no signature
        return False


def is_finite(value: Any) -> bool:
    """Whether something is a finite number, of a size that can be averaged and squared."""
    try:
        return isinstance(value, numbers.Real) and abs(float(value)) <= LARGEST_REWARD
    except OverflowError:  # an integer that is too large for a float
        return False


def _finite(label: str, value: Any) -> float:
    """Return a finite number, and refuse anything else."""
    if not is_finite(value):
        raise ValueError(
            f"{label} returned {repr(value)[:80]}, which is not a number from -1e12 to 1e12"
        )
    return float(value)


@dataclass(frozen=True)
class PooledTerms:
    """Terms that grade a completion together, in one process."""

    terms: tuple[tuple[str, Term], ...]

    def prepare(self) -> None:
        """Import what the terms need."""
        for _, term in self.terms:
            term.prepare()

    def __call__(self, sample: Sample) -> dict[str, float]:
        """Return the value of each term by label."""
        return {label: _finite(label, term.grade(sample)) for label, term in self.terms}


def build_term(name: str, options: Mapping[str, Any]) -> Term | BatchTerm:
    """Build a term by name; a wrong name or option is refused with the nearest right one."""
    make = find_entry(TERMS, name, kind="reward term")
    check_options(make, options, what=f"reward term {name}", table=name, hidden=("task",))
    return make(**options)


def default_label(name: str, options: Mapping[str, Any]) -> str:
    """Return a term's default name in metrics: that of its function, or else of the term."""
    return str(options["path"]).rpartition(":")[2] if "path" in options else name


TERMS: dict[str, type[Any]] = {
    "task": TaskTerm,
    "math": MathTerm,
    "format": FormatTerm,
    "overlong": OverlongTerm,
    "function": FunctionTerm,
    "batch_function": BatchFunctionTerm,
    "http": HttpTerm,
}
