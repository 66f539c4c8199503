"""A language model as the judge of a completion, behind an OpenAI-compatible server.

Replies are kept on disk by the request that they answer, so a resumed run pays for none of them
twice, and equal completions of a group are judged once.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from trustbatch.math_grading.extract import after_thinking
from trustbatch.rewards.base import Sample, ServerTerm, failure, is_finite
from trustbatch.rewards.http_client import DeadlineExceeded, InvalidResponse, JsonServer
from trustbatch.rewards.reply_cache import ReplyCache
from trustbatch.rewards.servers import check_server
from trustbatch.types import GradeStatus
from trustbatch.utils.worker import Outcome

PLACES = re.compile(r"\{(problem|answer|completion)\}")
NUMBER = r"(-?\d+(?:\.\d+)?)"


class NoScore(Exception):
    """A reply without a score that can be used."""


@dataclass(frozen=True, kw_only=True)
class JudgeTerm(ServerTerm):
    """A score from 0 to 1 that a language model gives, or the value of the choice that it makes."""

    base_url: str
    """such as http://localhost:8000/v1; /chat/completions is added"""
    model: str
    prompt: str
    """what the judge is asked; {problem}, {answer} and {completion} are replaced"""
    pattern: str | None = None
    """a regular expression whose last match in the reply has the score as its first group;
    default: the last number, or the last of the choices"""
    choices: Mapping[str, float] | None = None
    """value of each word that the judge may choose, such as {A = 1.0, B = 0.0}"""
    scale: float = 1.0
    """the highest score, which is worth 1; another number than 0 to this is no score"""
    temperature: float = 0.0
    max_tokens: int = 1024
    """of the reply"""
    timeout: float = 60.0
    """seconds per request"""
    deadline: float = 300.0
    """seconds for all requests of a batch, including retries"""
    concurrency: int = 8
    """requests at a time"""
    token_variable: str | None = None
    """environment variable with a token, sent as "Authorization: Bearer TOKEN\""""
    cache: str | None = None
    """folder for the replies; default: judge/ in the run folder"""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse what could not give a score, and a missing token."""
        check_server("judge", "base_url", self.base_url, self.token_variable)
        if "{completion}" not in self.prompt:
            raise ValueError("judge.prompt must contain {completion}, which the judge has to see.")
        limits = (self.scale, self.timeout, self.deadline, self.concurrency, self.max_tokens)
        if min(limits) <= 0 or self.temperature < 0:
            raise ValueError(
                "judge.scale, judge.timeout, judge.deadline, judge.concurrency and "
                "judge.max_tokens must be above 0, and judge.temperature not below it."
            )
        if self.choices is not None and not (
            self.choices and all(is_finite(value) for value in self.choices.values())
        ):
            raise ValueError("judge.choices is a table of numbers: write {A = 1.0, B = 0.0}.")
        try:
            num_groups = re.compile(self._pattern).groups
        except re.error as error:
            raise ValueError(f"judge.pattern is not a regular expression: {error}.") from error
        if num_groups < 1:
            raise ValueError("judge.pattern needs brackets around the score, as in Score: (.*).")

    def outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample; requests that agree are sent once."""
        end = time.monotonic() + self.deadline
        requests = [self._request(sample) for sample in samples]
        bodies = {_key(body): body for body in requests}
        with ReplyCache(self.cache) as cache:
            found = {key: self._scored(reply) for key, reply in cache.find(bodies).items()}
            missing = {key: body for key, body in bodies.items() if key not in found}
            for key, reply, outcome in self._ask_all(missing, end):
                found[key] = outcome
                if outcome.status is GradeStatus.GRADED:  # at once: a kill must not lose it
                    cache.add(key, reply)
        return [found[_key(body)] for body in requests]

    def read_score(self, reply: str) -> float:
        """Return the score in a reply; raises NoScore."""
        text = after_thinking(reply) or ""
        matches = [match[1] for match in re.finditer(self._pattern, text, re.IGNORECASE)]
        if not matches:
            raise NoScore(f"the judge gave no score, but {text.strip()[-80:]!r}")
        word = (matches[-1] or "").strip()
        if self.choices is not None:
            values = {name.casefold(): value for name, value in self.choices.items()}
            if word.casefold() not in values:
                raise NoScore(f"the judge chose {word[:80]!r}, which is none of judge.choices")
            return float(values[word.casefold()])
        try:
            score = float(word)
        except ValueError:
            raise NoScore(f"the judge gave the score {word[:80]!r}, which is no number") from None
        if not 0 <= score <= self.scale:
            raise NoScore(f"the judge gave the score {score:g}, not 0 to {self.scale:g}")
        return score / self.scale

    @property
    def _pattern(self) -> str:
        if self.pattern is not None:
            return self.pattern
        if self.choices is None:
            return NUMBER
        words = sorted(map(re.escape, self.choices), key=len, reverse=True)
        return rf"(?<!\w)({'|'.join(words)})(?!\w)"

    def _request(self, sample: Sample) -> dict[str, Any]:
        texts = {
            "problem": sample.prompt.text,
            "answer": sample.prompt.answer,
            "completion": sample.completion,
        }
        # in one pass: a completion that says {answer} must not be given it
        content = PLACES.sub(lambda place: texts[place[1]], self.prompt)
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }

    def _ask_all(
        self, bodies: Mapping[str, dict[str, Any]], end: float
    ) -> Iterable[tuple[str, str, Outcome]]:
        """Yield key, reply and outcome of each request as they come."""
        threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="judge")
        try:
            asked = {threads.submit(self._ask, body, end): key for key, body in bodies.items()}
            for done in as_completed(asked):
                yield asked[done], *done.result()
        finally:
            threads.shutdown(cancel_futures=True)

    def _ask(self, body: dict[str, Any], end: float) -> tuple[str, Outcome]:
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        server = JsonServer(url, self.timeout, self.token_variable)
        try:
            reply = _content(server.ask(body, end=end), url)
        except InvalidResponse as error:
            return "", failure(GradeStatus.FAILED, str(error))
        except DeadlineExceeded as error:
            reason = f"{url} gave no reply within {self.deadline:g} seconds: {error}"
            return "", failure(GradeStatus.TIMED_OUT, reason)
        return reply, self._scored(reply)

    def _scored(self, reply: str) -> Outcome:
        try:
            return Outcome(GradeStatus.GRADED, self.read_score(reply))
        except NoScore as error:
            return failure(GradeStatus.FAILED, str(error))


def _key(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _content(response: bytes, url: str) -> str:
    """Return the text of a chat completion."""
    try:
        content = json.loads(response)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise InvalidResponse(f"{url} must answer with a chat completion")
    return content
